# SPDX-License-Identifier: Apache-2.0
"""Predictions as text: the table `vllm-omni plan` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_omni.planning.cards import Card
from vllm_omni.planning.cost import Prediction, predict, splits
from vllm_omni.planning.stream_model import Split, StreamModel

_HOST = "  host"
_CARDS_GB = (16, 24, 32, 48, 80, 96, 141)
"""Memory of common cards."""
WEIGHT_ITEMSIZES = {"auto": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""Bytes of a number of a block's linear layers; NVFP4 has a scale of one byte for 16 of them."""
_PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "FP8 weights": {"weight_itemsize": WEIGHT_ITEMSIZES["fp8"]},
    "FP8 weights and K/V": {"weight_itemsize": WEIGHT_ITEMSIZES["fp8"], "kv_itemsize": 1},
}


def candidates(model: StreamModel, card: Card, gpus: int, sessions: int) -> list[Prediction]:
    """Every split that fits, the fastest first; equals by fewer GPUs and earlier first frame."""
    found = [predict(model, card, split, sessions) for split in splits(model, gpus, sessions)]
    return sorted(
        (each for each in found if each.fits), key=lambda p: (round(p.per_chunk_ms), p.split.gpus, p.first_frame_ms)
    )


def plan_text(model: StreamModel, card: Card, gpus: int, sessions: int) -> str:
    """The table of splits. Raises ValueError when nothing fits."""
    found = candidates(model, card, gpus, sessions)
    if not found:
        raise ValueError(f"{sessions} sessions of {model.name} fit no split of {gpus} {card.name}")
    lines = [
        f"{model.name}: {model.height}x{model.width}, {model.frames_per_chunk} frames a chunk, window {model.window}, "
        f"{model.parameters / 1e9:.1f}B parameters, {sessions} session{'s' if sessions > 1 else ''}, "
        f"up to {gpus} {card.name}{_served(model)}",
        f"{'split':24s} {'GPUs':>4s} {'FPS in all':>10s} {'FPS each':>9s} {'first frame':>12s} {'memory':>9s} "
        f"{'fits':>13s}",
    ]
    for each in found:
        lines.append(
            f"{each.split!s:24s} {each.split.gpus:4d} {each.fps:10.1f} {each.fps / sessions:9.1f} "
            f"{each.first_frame_ms / 1e3:10.2f} s {each.memory_bytes / 1e9:6.1f} GB {each.max_sessions:4d} sessions"
            f"{_HOST if each.host_bound else ''}"
        )
    if any(each.host_bound for each in found):
        graphs = "" if model.cuda_graphs else "; CUDA graphs take most of that away"
        lines.append(f"{_HOST.strip()}: passes wait for the host that launches their kernels{graphs}")
    lines.append(room(model, card))
    lines.append(f"best: {found[0].split} {' '.join(_flags(model, found[0].split))}".rstrip())
    return "\n".join(lines)


def room(model: StreamModel, card: Card) -> str:
    """How many sessions one GPU of each common size holds, at 10^9 bytes a GB."""
    counts = [predict(model, each, Split()).max_sessions for each in _sized(card)]
    held = ", ".join(f"{size} GB: {count or 'none'}" for size, count in zip(_CARDS_GB, counts, strict=True))
    return f"sessions that one GPU holds: {held}"


def fits_text(models: Sequence[StreamModel], card: Card) -> str:
    """A table: how many sessions one GPU of each common size holds of each model in each precision, the text encoder on
    the host or beside it. 0 = the model does not fit.
    """
    lines = [f"{'sessions on one GPU of':70s}" + "".join(f"{size:>5d} GB" for size in _CARDS_GB)]
    for model in models:
        for name, fields in _PRECISIONS.items():
            for text, on_cpu in (("text encoder on the host", True), ("text encoder beside it", False)):
                served = replace(model, text_on_cpu=on_cpu, **fields)
                held = "".join(f"{predict(served, each, Split()).max_sessions:8d}" for each in _sized(card))
                lines.append(f"{f'{model.name}, {name}, {text}':70s}{held}")
    return "\n".join(lines)


def _sized(card: Card) -> list[Card]:
    return [replace(card, memory_bytes=size * 1e9) for size in _CARDS_GB]


def _served(model: StreamModel) -> str:
    """The model's settings that differ from the defaults."""
    parts = [] if model.clean else [f"noise-matched, {model.denoise} steps"]
    parts += [f"{model.in_flight} chunks in flight"] if model.in_flight > 1 else []
    parts += ["video to video"] if model.video_input else []
    parts += ["FP8 keys and values"] if model.kv_itemsize == 1 else []
    parts += [f"{_weights_of(model)} weights"] if model.weight_itemsize < WEIGHT_ITEMSIZES["auto"] else []
    parts += [f"{model.adapters} LoRA adapters of rank {model.adapter_rank}"] if model.adapters else []
    parts += [] if model.cuda_graphs else ["no CUDA graphs"]
    return "".join(f", {part}" for part in parts)


def _weights_of(model: StreamModel) -> str:
    return next(name.upper() for name, size in WEIGHT_ITEMSIZES.items() if size == model.weight_itemsize)


def _flags(model: StreamModel, split: Split) -> list[str]:
    """Of `vllm serve --omni`."""
    flags, options = [], {}
    if split.ranks > 1:
        flags.append(f"--tensor-parallel-size {split.ranks}")
        if not split.tensor:
            options["model.sequence_parallel"] = "true"
    if split.stages > 1:
        flags.append(f"--pipeline-parallel-size {split.stages}")
    if split.replicas > 1:
        flags.append(f"--data-parallel-size {split.replicas}")
    if split.vae_stage:
        options["vae_stage"] = "true"
    if split.vae_parallel:
        options["vae_parallel"] = "true"
    if split.temporal:
        options["pipeline"] = "temporal"
    if model.in_flight > 1:
        options["chunks_in_flight"] = str(model.in_flight)
    if not model.clean:
        options["model.cache"] = "noise_matched"
    if model.video_input:
        options["model.video_input"] = "true"
    if model.chunk != StreamModel.chunk and not model.grid_tokens:  # else the checkpoint's
        options["model.latent_frames_per_chunk"] = str(model.chunk)
    if not model.cuda_graphs:
        options["model.cuda_graphs"] = "false"
    if model.kv_itemsize == 1:
        flags.append("--kv-cache-dtype fp8")
    if model.weight_itemsize == WEIGHT_ITEMSIZES["fp8"]:
        flags.append("--quantization fp8")
    if model.adapters:
        flags.append(f"--enable-lora --max-loras {model.adapters} --max-lora-rank {model.adapter_rank}")
    return flags + [f"--additional-config.omni.{name} {value}" for name, value in options.items()]
