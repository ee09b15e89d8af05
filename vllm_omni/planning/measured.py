# SPDX-License-Identifier: Apache-2.0
"""Measured speed of streaming models. `vllm-omni plan` prints these measurements in addition to the
models' memory use.

Speed is looked up and never predicted, because it depends on kernels, hosts and interconnects as
much as on tensor shapes. tests/planning/test_measured.py compares the table rows with the result
files that they cite.
"""

from functools import cache
from importlib.resources import files
from typing import Final

import msgspec

from vllm_omni.model_executor.presets import PresetName
from vllm_omni.planning.models import model_of
from vllm_omni.planning.stream_model import StreamModel

_FILE: Final = "measured.json"


class MeasuredRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurement of one engine at its model's default video size, with random weights."""

    model: str
    """Name of the network (`size_names`)."""
    gpu: str
    """Kind of GPU, for example "H200"."""
    gpus: int
    """Number of GPUs that the engine used."""
    split: str
    """How the model was split over the GPUs, in the text form of `ParallelSplit`. Ulysses ranks of
    one stage also share its decodes."""
    precision: str
    """Precision of weights, keys and values."""
    fps: float
    """Video frames per second, summed over all sessions."""
    first_frame_ms: float
    """Milliseconds from a session's first request to its first frame."""
    memory_gb: float
    """Peak allocated memory, in 10^9 bytes, on the GPU that uses the most."""
    source: str
    """Name of the result file in `benchmarks/results`, followed by `#` and the row in the file."""
    window: int | None = None
    """Number of latent frames in the K/V window. Default: the model's window."""
    matched_steps: int = 0
    """Number of denoise steps in a noise-matched stream. Default: 0, which means the strict cache.
    """
    sessions: int = 1
    """Number of live sessions."""
    preset: PresetName | None = None
    """Name of the preset that has exactly these settings, or None if there is none."""


@cache
def all_runs() -> tuple[MeasuredRun, ...]:
    """Return all measured runs."""
    return msgspec.json.decode(
        files(__package__).joinpath(_FILE).read_bytes(), type=tuple[MeasuredRun, ...]
    )


def find_runs(model: StreamModel, gpu: str, gpus: int) -> list[MeasuredRun]:
    """Return the measured runs of a network on at most `gpus` GPUs, sorted by the number of GPUs.

    For a checkpoint, these are the runs of the network with the same number of parameters and the
    same number of tokens per frame.
    """
    return sorted(
        (
            run
            for run in all_runs()
            if run.gpu == gpu and run.gpus <= gpus and _is_network(model, run.model)
        ),
        key=lambda run: (run.gpus, run.fps),
    )


def _is_network(model: StreamModel, name: str) -> bool:
    known = model_of(name)
    return (model.parameters, model.tokens_per_frame) == (known.parameters, known.tokens_per_frame)
