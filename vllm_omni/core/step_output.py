# SPDX-License-Identifier: Apache-2.0
"""`StepOutput`: what the diffusion runner tells the scheduler after one engine step, beside stock vLLM's fields.

It travels where a `ModelRunnerOutput` does, worker process to engine. Schedulers that do not know it read it as stock.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.outputs import ModelRunnerOutput


class ChunkProgress(NamedTuple):
    """Where a chunk stands after a step. size: elements of its latents, what its forward's cost goes by."""

    step: int
    num_steps: int
    size: int


@dataclass
class StepOutput(ModelRunnerOutput):
    """denoised: requests whose chunk is part of its session now, while its result is still being decoded or copied.

    Such a request is scheduled once more to deliver its result; its session's next chunk may start at once.

    progress: of this step's chunks that are not done. committed: requests whose chunk became part of its session now.
    steps_behind: how many steps a chunk stays behind the one before it (`omni.chunks_in_flight`).
    before_s: device time of the step that was launched before this one; None = the device and the host keep pace, or
    nobody knows. unfinished: the host is ahead, the device is still at this step.
    """

    denoised: tuple[str, ...] = ()
    committed: tuple[str, ...] = ()
    steps_behind: int = 1
    progress: dict[str, ChunkProgress] = field(default_factory=dict)
    before_s: float | None = None
    unfinished: bool = False
