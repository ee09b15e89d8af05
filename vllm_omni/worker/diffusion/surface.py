# SPDX-License-Identifier: Apache-2.0
"""`RunnerSurface`: runner methods that vLLM's worker calls and that block pool and sampler alone would need.

tests/worker/test_runner_surface.py reads the worker's source and finds methods that are missing here.
"""

from typing import Any

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput


class RunnerSurface:
    """Mix in. Answers honestly: nothing to profile, to capture or to sample. (LoRA adapters are the runner's.)"""

    is_pooling_model = True
    lora_config = None
    device: torch.device

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("plugin",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {}  # sessions live in the runner, not in vLLM's block pool

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to do."""

    initialize_kv_cache = update_max_model_len = profile_run = warming_up_model = _nothing
    _dummy_pooler_run = _dummy_sampler_run = pool = take_draft_token_ids = get_draft_model = _nothing
    reset_mm_cache = reset_encoder_cache = reset_lora_state = maybe_remove_all_loras = _nothing

    def profile_cudagraph_memory(self) -> int:
        return 0

    capture_model = profile_cudagraph_memory

    def needs_cudagraph_capture(self) -> bool:
        return False

    def _dummy_run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Called for data-parallel dummy batches: diffusion ranks do not run in lockstep, so there is nothing to do."""
        empty = torch.empty(0, device=self.device)
        return empty, empty

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT

    def get_encoder_timing_stats(self) -> dict[str, Any]:
        return {}
