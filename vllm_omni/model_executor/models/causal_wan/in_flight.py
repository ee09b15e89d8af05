# SPDX-License-Identifier: Apache-2.0
"""Chunks in flight: which cache modes allow several, their distance in steps, and which K/V must be
retained.

With a noise-matched cache, step j of a chunk sees earlier chunks as they were at step j. It may
therefore run as soon as the previous chunk has finished that step. Its K/V are written to separate
ring buffer slots. The frames that they overwrite are retained while an uncommitted chunk that sees
them could be run again.
"""

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.config import CausalWanOptions
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan

STEPS_BEHIND = 1
"""Distance in steps between consecutive chunks."""


def spare_frames(
    options: CausalWanOptions, plan: ChunkPlan, omni: OmniConfig, parallel: ParallelContext
) -> tuple[int, ...]:
    """Return how many spare frames each window's ring buffer needs.

    This is the number of frames that chunks may write ahead of the oldest uncommitted chunk. On one
    rank, a chunk is committed in the engine step of its last pass. On several ranks, earlier stages
    learn of the commit later.
    """
    if options.cache == "strict":
        return (0,)
    passes, spare = (
        options.text_schedule().num_steps,
        (omni.chunks_in_flight - 1) * plan.chunk_frames,
    )
    # On one rank, the last step's frames are committed when they are written.
    return (spare,) * passes if parallel.num_stages > 1 else (*(spare,) * (passes - 1), 0)
