# SPDX-License-Identifier: Apache-2.0
"""`StepOutput`: the diffusion runner's message to the scheduler after one engine step, beside stock vLLM's fields.

It travels as a `ModelRunnerOutput`, from worker process to engine. Stock schedulers read only vLLM's fields.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.outputs import ModelRunnerOutput


class ChunkProgress(NamedTuple):
    """A chunk's progress after a step. size: elements of its latents, to which its forward's cost is proportional."""

    step: int
    num_steps: int
    size: int


@dataclass
class StepOutput(ModelRunnerOutput):
    """denoised: requests whose chunk is committed, while its result is still being decoded or copied.

    Such a request is scheduled once more to deliver its result; its session's next chunk may start at once.

    progress: of this step's chunks that are not done. committed: requests whose chunk was committed in this step.
    steps_behind: how many steps a chunk stays behind the one before it (`omni.chunks_in_flight`).
    before_s: device time of the step launched before this one; None = device and host keep pace, or it is not known.
    unfinished: the host is ahead, the device still runs this step.
    """

    denoised: tuple[str, ...] = ()
    committed: tuple[str, ...] = ()
    steps_behind: int = 1
    progress: dict[str, ChunkProgress] = field(default_factory=dict)
    before_s: float | None = None
    unfinished: bool = False
