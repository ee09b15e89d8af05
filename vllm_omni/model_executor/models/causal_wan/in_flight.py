# SPDX-License-Identifier: Apache-2.0
"""Several chunks of one stream at once: which cache semantics allow it, how far chunks stay apart, what K/V is kept.

A chunk's step j sees earlier chunks as they were at some step: j itself (noise-matched), or further on (cascaded, by
`cascade_offset` a chunk). So it may run as soon as the chunk before has done that step. What it writes goes into ring
slots of its own; the frames it overwrites are kept as long as an uncommitted chunk could be run again and see them.
Held by tests/model_executor/models/causal_wan/test_causal_wan_in_flight.py.
"""

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.config import CausalWanOptions
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan


def steps_behind(options: CausalWanOptions) -> int:
    """How many steps a chunk stays behind the one before it."""
    return 1 + (options.cascade_offset if options.cache == "cascaded" else 0)


def refuse_chunks_in_flight(options: CausalWanOptions, plan: ChunkPlan) -> str | None:
    """Why a stream's chunks must run one after the other; None if they need not."""
    if options.cache == "strict":
        return "cache 'strict' shows a chunk the clean chunk before it, which must be done first; try 'noise_matched'"
    if options.cache == "cascaded" and 0 < plan.sink_frames < plan.window_frames and _sinks_live(options):
        return (
            "the steps of cache 'cascaded' share one set of sinks, placed for one chunk at a time: set sink_position "
            "'absolute' without sink_refresh_threshold, or sink_frames 0"
        )
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
    """Return by how many frames each window's ring must be longer than what is seen of it.

    As many chunks as may have written there ahead of the oldest uncommitted one. On one rank a chunk is committed in
    the engine step of its last pass; on several, an earlier stage hears of it later.
    """
    passes = options.text_schedule().num_steps + (options.cache != "noise_matched")
    if options.cache == "strict":
        return (0,)
    ahead = omni.chunks_in_flight - 1
    if parallel.num_stages > 1:
        return (ahead * plan.chunk_frames,) * passes
    further = steps_behind(options) - 1  # at 0, all chunks in flight may have done the same steps

    def chunks(window: int) -> int:
        left = passes - 2 - window
        return 0 if left < 0 else min(ahead, left // further) if further else ahead

    return tuple(chunks(window) * plan.chunk_frames for window in range(passes))


def _sinks_live(options: CausalWanOptions) -> bool:
    return options.sink_position == "window" or options.sink_refresh_threshold is not None
