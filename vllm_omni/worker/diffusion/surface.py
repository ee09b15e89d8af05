# SPDX-License-Identifier: Apache-2.0
"""`RunnerSurface`: methods of vLLM's runner interface that a diffusion runner does not need.

vLLM's worker calls these methods for its block pool and its sampler.
tests/worker/test_runner_surface.py finds missing methods by reading the worker's source.
"""

from typing import Any

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput


class RunnerSurface:
    """Mixin for a runner that has nothing to profile, capture or sample."""

    is_pooling_model = True
    lora_config = None
    device: torch.device

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("plugin",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {}  # because sessions are stored in the runner, not in vLLM's block pool

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    initialize_kv_cache = update_max_model_len = profile_run = warming_up_model = _nothing
    _dummy_pooler_run = _dummy_sampler_run = pool = take_draft_token_ids = get_draft_model = (
        _nothing
    )
    reset_mm_cache = reset_encoder_cache = reset_lora_state = maybe_remove_all_loras = _nothing

    def profile_cudagraph_memory(self) -> int:
        return 0

    capture_model = profile_cudagraph_memory

    def needs_cudagraph_capture(self) -> bool:
        return False

    def _dummy_run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Do nothing for a data-parallel dummy batch, because data-parallel diffusion ranks do not
        run in lockstep.
        """
        empty = torch.empty(0, device=self.device)
        return empty, empty

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT

    def get_encoder_timing_stats(self) -> dict[str, Any]:
        return {}
