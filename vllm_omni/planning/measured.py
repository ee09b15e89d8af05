# SPDX-License-Identifier: Apache-2.0
"""Measured speed of streaming models, which `vllm-omni plan` prints in addition to their memory.

Speed is looked up and never predicted, because it depends on kernels, hosts and links as much as
on shapes. tests/planning/test_measured.py compares the rows with the result files that they cite.
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
    """One measured engine, at the default size of its model and with random weights."""

    model: str
    """Name of the network (`size_names`)."""
    gpu: str
    """Kind of GPU."""
    gpus: int
    """Number of GPUs."""
    split: str
    """How the GPUs were used (`str(Split)`). Ulysses ranks of one stage also share its decodes."""
    precision: str
    """Precision of weights, keys and values."""
    fps: float
    """Video frames per second, of all sessions together."""
    first_frame_ms: float
    """Milliseconds from the request of a session to its first frame."""
    memory_gb: float
    """Peak of the memory allocated on the fullest GPU, in 10^9 bytes."""
    source: str
    """Result file in `benchmarks/results`, and after `#` the row in it."""
    window: int | None = None
    """Latent frames in the K/V window. Default: the model's."""
    matched_steps: int = 0
    """Denoise steps of a noise-matched stream. Default: 0, the strict cache."""
    sessions: int = 1
    """Live sessions."""
    preset: PresetName | None = None
    """Preset with exactly these settings. Default: none."""


@cache
def all_runs() -> tuple[MeasuredRun, ...]:
    """Return every row of the table."""
    return msgspec.json.decode(
        files(__package__).joinpath(_FILE).read_bytes(), type=tuple[MeasuredRun, ...]
    )


def find_runs(model: StreamModel, gpu: str, gpus: int) -> list[MeasuredRun]:
    """Return the runs of a network on at most `gpus` GPUs, the fewest GPUs first.

    A checkpoint is matched to the network with the same number of parameters and tokens per frame.
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
