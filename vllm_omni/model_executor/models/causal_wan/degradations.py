# SPDX-License-Identifier: Apache-2.0
"""What a single chunk can go without (`omni.degradations`), by how the model is configured.

Held by test_causal_wan_fewer_steps.py, test_causal_wan_smaller_window.py and test_causal_wan_tiny_chunks.py in
tests/model_executor/models/causal_wan/.
"""

from vllm_omni.config import Degradation
from vllm_omni.model_executor.layers.narrow_view import narrow_frames
from vllm_omni.model_executor.models.causal_wan.config import CausalWanOptions
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan

FEWER_STEPS: Degradation = "fewer_steps"
SMALLER_WINDOW: Degradation = "smaller_window"
TINY_VAE: Degradation = "tiny_vae"


def refuse_degradation(name: str, options: CausalWanOptions, plan: ChunkPlan) -> str | None:
    """Why chunks cannot go without `name`; None if they can."""
    if name == TINY_VAE:
        return "omni.model.decoder 'tiny' decodes all chunks with it" if options.decoder == "tiny" else None
    if name == SMALLER_WINDOW:
        return _refuse_smaller_window(options, plan)
    assert name == FEWER_STEPS
    if options.cache != "strict":
        return f"cache {options.cache!r} keeps a window for every step, so each chunk needs all of them"
    return None if options.text_schedule().num_steps > 1 else "denoising_steps has one entry"


def _refuse_smaller_window(options: CausalWanOptions, plan: ChunkPlan) -> str | None:
    if options.cache != "strict":
        return f"cache {options.cache!r} keeps a window for every step; only 'strict' has one to look at"
    ring = plan.window_frames - plan.sink_frames
    if ring == 0:
        return "window_frames -1 is global attention"
    if narrow_frames(ring, plan.chunk_frames) == ring:
        return "behind its sinks the window holds one chunk"
    return None
