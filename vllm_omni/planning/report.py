# SPDX-License-Identifier: Apache-2.0
"""Predictions as text: the table `vllm-omni plan` prints, and the one that holds predictions against measured runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni.planning.cards import Card
from vllm_omni.planning.cost import Prediction, Split, StreamModel, launch_ms, pass_latency_ms, predict, splits
from vllm_omni.planning.models import model_of

_NAMES = {"1.3B": "causal_wan_1_3b", "14B": "causal_wan_14b"}
"""What benchmarks/streaming_wan.py calls them -> ours."""
_HOST = "  host"
_OPTIONS = {"window": "window_frames", "sinks": "sink_frames"}


@dataclass(frozen=True)
class Compared:
    """One quantity of one measured run. unit: `ms` or `GB`."""

    run: str
    quantity: str
    measured: float
    predicted: float
    unit: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


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
        helps = not model.cuda_graphs and replace(model, cuda_graphs=True).launches_graphs
        graphs = "; --cuda-graphs takes most of that away" if helps else ""
        lines.append(f"{_HOST.strip()}: passes wait for the host that launches their kernels{graphs}")
    lines.append(f"best: {found[0].split} {' '.join(_flags(model, found[0].split))}".rstrip())
    return "\n".join(lines)


def _served(model: StreamModel) -> str:
    """What of the model is not as by default."""
    parts = [] if model.clean else [f"noise-matched, {model.denoise} steps"]
    parts += [f"{model.in_flight} chunks in flight"] if model.in_flight > 1 else []
    parts += ["CUDA graphs"] if model.launches_graphs else []
    return "".join(f", {part}" for part in parts)


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
    if model.launches_graphs:
        options["model.cuda_graphs"] = "true"
    return flags + [f"--additional-config.omni.{name} {value}" for name, value in options.items()]


def compare(run: str, result: Mapping[str, Any], card: Card) -> list[Compared]:
    """Hold the predictions against one `result` of a benchmark.

    Of benchmarks/lingbot_world.py or benchmarks/streaming_wan.py (one engine), or of benchmarks/pipeline_parallel.py
    (rows; those that ended in an error are left out).
    """
    if "rows" not in result:
        return _compare_one(run, result, result["parallel"], card)
    found: list[Compared] = []
    for name, row in result["rows"].items():
        if "error" not in row:
            ranks = {"sequence": 1, "tensor": 1, "sequence" if row["sequence"] else "tensor": row["ranks"]}
            facts = {**row, "model": result["model"], "size": result["size"]}
            found += _compare_one(f"{run}: {name}", facts, {**ranks, "pipeline": row["stages"]}, card)
    return found


def _compare_one(run: str, result: Mapping[str, Any], parallel: Mapping[str, int], card: Card) -> list[Compared]:
    height, width = result["size"]
    options = result["model_options"]
    changes = {
        "height": height,
        "width": width,
        "text_on_cpu": options.get("text_encoder_device") == "cpu",
        **{ours: options[theirs] for ours, theirs in _OPTIONS.items() if theirs in options},
        **cache_facts(options, result.get("chunks_in_flight", 1)),
    }
    name = result.get("model", "lingbot_world")
    model = model_of(_NAMES.get(name, name), **changes)
    # A result tells the time of the passes before it: of all of them, if it waited for the clean pass.
    model = replace(model, waits_for_clean=model.clean > 0 and len(result["steps_ms"]) == model.passes)
    sequence, tensor = parallel["sequence"], parallel["tensor"]
    split = Split(
        max(sequence, tensor),
        parallel["pipeline"],
        tensor > sequence,
        vae_stage=result.get("vae_stage", False),
        temporal=result.get("temporal", False),
        vae_parallel=result.get("vae_parallel", False),  # runs of before there was such a thing do not say
        replicas=result.get("replicas", 1),
    )
    sessions = result["sessions"] if "sessions" in result else result["streams"]
    wanted = predict(model, card.beside_host(host_factor(model, card, split, result)), split, sessions)
    peak = max(memory["torch_peak"] for memory in result["device_memory"])
    return [
        Compared(run, "chunk interval", result["chunk_interval_ms"], wanted.chunk_ms, "ms"),
        Compared(run, "first frame", result["time_to_first_frame_ms"], wanted.first_frame_ms, "ms"),
        Compared(run, "peak memory of a GPU", peak / 1e9, wanted.memory_bytes / 1e9, "GB"),
    ]


def host_factor(model: StreamModel, card: Card, split: Split, result: Mapping[str, Any]) -> float:
    """How much slower than the card's the host of a run launches kernels, by its first chunk's passes.

    No graph serves those, so they wait for the host more than later ones. Where they do not, they tell only that it is
    not slower than they are. 1 if the run does not say, or if stages share the layers.
    """
    passes = result.get("first_chunk_timings_ms", {}).get("steps", [])[1 : model.denoise]
    if not passes or split.layer_parts > 1:
        return 1.0
    measured = min(passes)
    device, _ = pass_latency_ms(model, card, split, model.first_chunk)
    factor = measured / launch_ms(model, card, split)
    return factor if measured > 1.05 * device else min(1.0, factor)


def cache_facts(options: Mapping[str, Any], chunks_in_flight: int) -> dict[str, Any]:
    """The fields of `StreamModel` that options of causal Wan (`omni.model`) decide; nothing for what they leave out."""
    facts: dict[str, Any] = {"in_flight": chunks_in_flight} if chunks_in_flight > 1 else {}
    if "denoising_steps" in options:
        facts["denoise"] = len(options["denoising_steps"])
    if options.get("cache", "strict") != "strict":
        facts["clean"] = 0
    if "first_chunk_latent_frames" in options:
        facts["first_chunk"] = options["first_chunk_latent_frames"]
    if "cuda_graphs" in options:
        facts["cuda_graphs"] = options["cuda_graphs"]
    return facts


def compare_table(rows: Sequence[Compared]) -> str:
    """Markdown."""
    lines = ["| run | quantity | measured | predicted | error |", "|---|---|---|---|---|"]
    for row in rows:
        digits = 0 if row.unit == "ms" else 1
        lines.append(
            f"| {row.run} | {row.quantity} | {row.measured:.{digits}f} {row.unit} "
            f"| {row.predicted:.{digits}f} {row.unit} | {100 * row.error:+.1f} % |"
        )
    return "\n".join(lines)
