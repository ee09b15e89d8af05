# SPDX-License-Identifier: Apache-2.0
"""Several chunks of one stream at once: which cache semantics allow it, how far chunks stay apart, which K/V are kept.

With a noise-matched cache a chunk's step j sees earlier chunks as they were at their step j, so it may run as soon as
the chunk before has done that step. Its K/V go into ring slots of its own; the frames it overwrites are kept
as long as an uncommitted chunk could be run again and see them.
Held by tests/model_executor/models/causal_wan/test_causal_wan_in_flight.py.
"""

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.config import CausalWanOptions
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan

STEPS_BEHIND = 1
"""How many steps a chunk stays behind the one before it."""


def refuse_chunks_in_flight(options: CausalWanOptions) -> str | None:
    """Why a stream's chunks must run one after the other; None if they need not."""
    if options.cache == "strict":
        return "cache 'strict' shows a chunk the clean chunk before it, which must be done first; try 'noise_matched'"
    return None


def refuse_temporal_pipeline(options: CausalWanOptions, num_stages: int) -> str | None:
    """Why `num_stages` stages cannot own a denoise step each; None if they can."""
    if options.cache != "noise_matched":
        return f"cache {options.cache!r} lets a step see K/V of other steps; a stage has its own only: 'noise_matched'"
    num_steps = options.text_schedule().num_steps
    if num_steps != num_stages:
        return (
            f"denoising_steps has {num_steps} entries and every stage with layers owns one, got {num_stages}: "
            f"pass --pipeline-parallel-size {num_steps}, or one more with omni.vae_stage"
        )
    return None


def spare_frames(
    options: CausalWanOptions, plan: ChunkPlan, omni: OmniConfig, parallel: ParallelContext
) -> tuple[int, ...]:
    """Return by how many frames each window's ring must be longer than its visible part.

    As many chunks as may have written there ahead of the oldest uncommitted one. On one rank a chunk is committed in
    the engine step of its last pass; on several, an earlier stage hears of it later.
    """
    if options.cache == "strict":
        return (0,)
    passes, spare = options.text_schedule().num_steps, (omni.chunks_in_flight - 1) * plan.chunk_frames
    # On one rank the last step's frames are committed as they are written.
    return (spare,) * passes if parallel.num_stages > 1 else (*(spare,) * (passes - 1), 0)
