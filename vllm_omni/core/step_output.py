# SPDX-License-Identifier: Apache-2.0
"""`StepOutput`: message of the diffusion runner to the scheduler after one engine step.

It is a `ModelRunnerOutput` with additional fields and travels from the worker process to the
engine. Stock schedulers read only vLLM's fields.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.outputs import ModelRunnerOutput


class ChunkProgress(NamedTuple):
    """Progress of a chunk after a step."""

    step: int
    """Steps done."""
    num_steps: int
    """Steps in total."""
    size: int
    """Number of elements of the latents, to which the cost of a forward pass is proportional."""


@dataclass
class StepOutput(ModelRunnerOutput):
    """Output of the diffusion runner for one engine step."""

    denoised: tuple[str, ...] = ()
    """Requests whose chunk is committed while its result is still being decoded or copied. Each is
    scheduled once more to deliver the result; the session's next chunk may start at once."""
    committed: tuple[str, ...] = ()
    """Requests whose chunk was committed in this step."""
    steps_behind: int = 1
    """Number of steps between a chunk and its predecessor (`omni.chunks_in_flight`)."""
    progress: dict[str, ChunkProgress] = field(default_factory=dict)
    """Progress of this step's unfinished chunks by request id."""
    before_s: float | None = None
    """Device time in seconds of the step launched before this one. None if it is unknown or if the
    host does not run ahead of the device."""
    unfinished: bool = False
    """Whether the device is still running this step, because the host is ahead."""
