# SPDX-License-Identifier: Apache-2.0
"""The tables that `vllm-omni plan` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.presets import DEFAULT_PRESET
from vllm_omni.planning.measured import find_runs
from vllm_omni.planning.memory import GPU_BYTES, MemoryPlan, plan_memory, splits
from vllm_omni.planning.preset_records import speed_of_record
from vllm_omni.planning.stream_model import ParallelSplit, StreamModel

_GPU_SIZES_GB: Final = (12, 16, 24, 32, 48, 80, 96, 141)
"""Memory sizes of common GPUs in GB."""
WEIGHT_ITEMSIZES: Final = {"auto": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""Bytes per weight in the linear layers of a block. For NVFP4, this includes one byte of scale for
every 16 weights."""
_PRECISIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bf16": {},
    "FP8 weights": {"weight_itemsize": WEIGHT_ITEMSIZES["fp8"]},
    "FP8 weights and K/V": {"weight_itemsize": WEIGHT_ITEMSIZES["fp8"], "kv_itemsize": 1},
}


def fitting_splits(model: StreamModel, gpu: str, gpus: int, sessions: int) -> list[MemoryPlan]:
    """Return every split that leaves enough memory for `sessions` sessions, sorted by the number of
    GPUs.
    """
    plans = [plan_memory(model, GPU_BYTES[gpu], split, sessions) for split in splits(model, gpus)]
    fitting = [plan for plan in plans if plan.max_sessions >= sessions]
    return sorted(fitting, key=lambda plan: plan.split.gpus)


@dataclass(frozen=True)
class ServedDefaults:
    """What `vllm serve --omni` does with a model if no option is given except a preset."""

    model: StreamModel
    """The model with the defaults of its preset."""
    schedule_steps: int
    """Number of denoise steps in the model's schedule, which a preset may reduce."""


def plan_text(
    model: StreamModel, defaults: ServedDefaults, gpu: str, gpus: int, sessions: int
) -> str:
    """Return the table of splits and the measured runs.

    Args:
        model: The planned model.
        defaults: The model without the user's changes. The table lists the options that lead from
            these defaults to the planned model.
        gpu: Kind of GPU, a key of `GPU_BYTES`.
        gpus: Largest number of GPUs.
        sessions: Number of live sessions.

    Raises:
        ValueError: No split fits.
    """
    plans = fitting_splits(model, gpu, gpus, sessions)
    if not plans:
        raise ValueError(f"{sessions} sessions of {model.name} fit no split of {gpus} {gpu}")
    count = f"{sessions} session{'s' if sessions > 1 else ''}"
    lines = [
        f"{model.name}: {model.height}x{model.width}, {model.frames_per_chunk} frames per chunk, "
        f"window {model.window}, {model.parameters / 1e9:.1f}B parameters, {count}, "
        f"up to {gpus} {gpu}{_settings(model)}",
        f"{'split':24s} {'GPUs':>4s} {'memory':>9s} {'fits':>13s}  options",
    ]
    for plan in plans:
        options = " ".join(_options(model, defaults, plan.split, sessions))
        row = (
            f"{plan.split!s:24s} {plan.split.gpus:4d} {plan.memory_bytes / 1e9:6.1f} GB "
            f"{plan.max_sessions:4d} sessions  {options}"
        )
        lines.append(row.rstrip())
    lines += _notes(model, defaults)
    lines += [room_text(model), _presets_line(model), *_measured_lines(model, gpu, gpus)]
    return "\n".join(lines)


def room_text(model: StreamModel) -> str:
    """Return a line with the number of sessions that fit on one GPU of each common size. A GB is
    10^9 bytes.
    """
    counts = [
        plan_memory(model, size * 1e9, ParallelSplit()).max_sessions for size in _GPU_SIZES_GB
    ]
    held = (
        f"{size} GB: {count or 'none'}" for size, count in zip(_GPU_SIZES_GB, counts, strict=True)
    )
    return f"sessions that one GPU holds: {', '.join(held)}"


def fits_text(models: Sequence[StreamModel]) -> str:
    """Return a table that states how many sessions of each model fit on one GPU of each common
    size.

    Each model has one row for each combination of precision and text-encoder device. 0 means that
    the model does not fit.
    """
    sizes = "".join(f"{size:>5d} GB" for size in _GPU_SIZES_GB)
    lines = [f"{'sessions on one GPU of':70s}{sizes}"]
    for model in models:
        for name, fields in _PRECISIONS.items():
            for device, on_cpu in (("host", True), ("GPU", False)):
                served = replace(model, text_on_cpu=on_cpu, **fields)
                counts = (
                    plan_memory(served, size * 1e9, ParallelSplit()).max_sessions
                    for size in _GPU_SIZES_GB
                )
                row = f"{model.name}, {name}, text encoder on the {device}"
                lines.append(f"{row:70s}" + "".join(f"{count:8d}" for count in counts))
    return "\n".join(lines)


def _presets_line(model: StreamModel) -> str:
    speeds = (f"{name}: {speed_of_record(model, name)}" for name in model.presets)
    return f"presets: {'; '.join(speeds)}"


def _measured_lines(model: StreamModel, gpu: str, gpus: int) -> list[str]:
    runs = find_runs(model, gpu, gpus)
    if not runs:
        return [f"measured: no run of this model and size on up to {gpus} {gpu}"]
    lines = [
        f"{'measured':24s} {'GPUs':>4s} {'FPS in all':>10s} {'first frame':>12s} {'memory':>9s}"
    ]
    for run in runs:
        details = [run.precision] + ([f"preset {run.preset}"] if run.preset else [])
        details += [f"window {run.window}"] if run.window else []
        details += [f"noise-matched, {run.matched_steps} steps"] if run.matched_steps else []
        details += [f"{run.sessions} sessions"] if run.sessions > 1 else []
        lines.append(
            f"{run.split:24s} {run.gpus:4d} {run.fps:10.1f} {run.first_frame_ms / 1e3:10.2f} s "
            f"{run.memory_gb:6.1f} GB  {', '.join(details)}"
        )
    return lines


def _settings(model: StreamModel) -> str:
    """Return text that lists the model settings that differ from the defaults."""
    parts = [] if model.preset == DEFAULT_PRESET else [f"preset {model.preset}"]
    parts += [f"noise-matched, {model.denoise} steps"] if model.noise_matched else []
    parts += [f"{model.in_flight} chunks in flight"] if model.in_flight > 1 else []
    parts += ["video to video"] if model.video_input else []
    parts += ["FP8 keys and values"] if model.kv_itemsize == 1 else []
    parts += [
        f"{name.upper()} weights"
        for name in ("fp8", "nvfp4")
        if model.weight_itemsize == WEIGHT_ITEMSIZES[name]
    ]
    parts += (
        [f"{model.adapters} LoRA adapters of rank {model.adapter_rank}"] if model.adapters else []
    )
    return "".join(f", {part}" for part in parts)


def _options(
    model: StreamModel, defaults: ServedDefaults, split: ParallelSplit, sessions: int
) -> list[str]:
    """Return the `vllm serve --omni` options for a model with the given split."""
    flags, options = _split_options(split)
    default = defaults.model
    if model.preset != DEFAULT_PRESET:
        options["model.preset"] = model.preset
    if model.in_flight > 1:
        options["chunks_in_flight"] = str(model.in_flight)
    if model.noise_matched:
        options["model.cache"] = "noise_matched"
    if default.denoise != model.denoise <= defaults.schedule_steps:
        options["model.max_steps"] = str(model.denoise)
    if model.video_input:
        options["model.video_input"] = "true"
    if model.chunk != default.chunk:
        options["model.latent_frames_per_chunk"] = str(model.chunk)
    if model.window != default.window:
        options["model.window_frames"] = str(model.window)
    if (model.height, model.width) != (default.height, default.width):
        # The server does not complete a single side with the model's other side.
        options |= {"height": str(model.height), "width": str(model.width)}
    if model.text_on_cpu != default.text_on_cpu:
        options["model.text_encoder_device"] = "cpu" if model.text_on_cpu else "null"
    if sessions > OmniConfig().max_sessions:
        options["max_sessions"] = str(sessions)
    if model.kv_itemsize != default.kv_itemsize:
        flags.append("--kv-cache-dtype fp8")
    if model.weight_itemsize == WEIGHT_ITEMSIZES["fp8"] != default.weight_itemsize:
        flags.append("--quantization fp8")
    if model.adapters:
        flags.append(
            f"--enable-lora --max-loras {model.adapters} --max-lora-rank {model.adapter_rank}"
        )
    return flags + [f"--additional-config.omni.{name} {value}" for name, value in options.items()]


def _split_options(split: ParallelSplit) -> tuple[list[str], dict[str, str]]:
    """Return the flags of vLLM and the options under `omni` that select a split."""
    flags, options = [], {}
    if split.ranks > 1:
        flags.append(f"--tensor-parallel-size {split.ranks}")
        if not split.tensor:
            options["model.sequence_parallel"] = "true"
    if split.stages > 1:
        flags.append(f"--pipeline-parallel-size {split.stages}")
    if split.vae_stage:
        options["vae_stage"] = "true"
    if split.vae_parallel:
        options["vae_parallel"] = "true"
    if split.temporal:
        options["pipeline"] = "temporal"
    return flags, options


def _notes(model: StreamModel, defaults: ServedDefaults) -> list[str]:
    """Return a line for each planned setting that no single option of the server selects."""
    notes = []
    if model.weight_itemsize == WEIGHT_ITEMSIZES["nvfp4"]:
        notes.append(
            "note: NVFP4 weights need a checkpoint that is stored in NVFP4, which needs no option"
        )
    if model.denoise > defaults.schedule_steps:
        notes.append(
            f"note: {model.denoise} denoise steps are more than the model's "
            f"{defaults.schedule_steps}: list them in omni.model.denoising_steps and "
            "omni.model.video_denoising_steps"
        )
    return notes
