# SPDX-License-Identifier: Apache-2.0
"""Predictions as text: the table `vllm-omni plan` prints, and the one that holds predictions against measured runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni.planning.cards import Card
from vllm_omni.planning.cost import Prediction, Split, StreamModel, predict, splits
from vllm_omni.planning.models import model_of

_NAMES = {"1.3B": "causal_wan_1_3b", "14B": "causal_wan_14b"}
"""What benchmarks/streaming_wan.py calls them -> ours."""
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
    found = [predict(model, card, split, sessions) for split in splits(model, gpus)]
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
        f"up to {gpus} {card.name}",
        f"{'split':24s} {'GPUs':>4s} {'FPS in all':>10s} {'FPS each':>9s} {'first frame':>12s} {'memory':>9s} "
        f"{'fits':>13s}",
    ]
    for each in found:
        lines.append(
            f"{each.split!s:24s} {each.split.gpus:4d} {each.fps:10.1f} {each.fps / sessions:9.1f} "
            f"{each.first_frame_ms / 1e3:10.2f} s {each.memory_bytes / 1e9:6.1f} GB {each.max_sessions:4d} sessions"
        )
    best = found[0]
    flags = []
    if best.split.ranks > 1:
        flags.append(f"--tensor-parallel-size {best.split.ranks}")
        if not best.split.tensor:
            flags.append("--additional-config.omni.model.sequence_parallel true")
    if best.split.stages > 1:
        flags.append(f"--pipeline-parallel-size {best.split.stages}")
    if best.split.vae_stage:
        flags.append("--additional-config.omni.vae_stage true")
    lines.append(f"best: {best.split} {' '.join(flags)}".rstrip())
    return "\n".join(lines)


def compare(run: str, result: Mapping[str, Any], card: Card) -> list[Compared]:
    """Hold the predictions against one `result` of benchmarks/lingbot_world.py or benchmarks/streaming_wan.py."""
    height, width = result["size"]
    options, parallel = result["model_options"], result["parallel"]
    changes = {
        "height": height,
        "width": width,
        "text_on_cpu": options.get("text_encoder_device") == "cpu",
        **{ours: options[theirs] for ours, theirs in _OPTIONS.items() if theirs in options},
    }
    name = _NAMES[result["model"]] if "model" in result else "lingbot_world"
    sequence, tensor = parallel["sequence"], parallel["tensor"]
    split = Split(max(sequence, tensor), parallel["pipeline"], tensor > sequence)
    sessions = result["sessions"] if "sessions" in result else result["streams"]
    wanted = predict(model_of(name, **changes), card, split, sessions)
    peak = max(memory["torch_peak"] for memory in result["device_memory"])
    return [
        Compared(run, "chunk interval", result["chunk_interval_ms"], wanted.chunk_ms, "ms"),
        Compared(run, "first frame", result["time_to_first_frame_ms"], wanted.first_frame_ms, "ms"),
        Compared(run, "peak memory of a GPU", peak / 1e9, wanted.memory_bytes / 1e9, "GB"),
    ]


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
