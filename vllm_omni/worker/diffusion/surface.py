# SPDX-License-Identifier: Apache-2.0
"""`RunnerSurface`: runner methods that vLLM's worker calls and that block pool, sampler and adapters alone would need.

tests/worker/test_runner_surface.py reads the worker's source and finds methods that are missing here.
"""

from typing import Any

import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput


class RunnerSurface:
    """Mix in. Answers honestly: nothing to profile, to capture, to sample or to adapt."""

    is_pooling_model = True
    lora_config = None
    device: torch.device

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("plugin",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {}  # sessions live in the runner, not in vLLM's block pool

    def initialize_kv_cache(self, kv_cache_config: Any, kv_cache_allocation_context: Any = None) -> None: ...

    def update_max_model_len(self, max_model_len: int) -> None: ...

    def profile_run(self, *args: Any, **kwargs: Any) -> None: ...

    def profile_cudagraph_memory(self) -> int:
        return 0

    def capture_model(self) -> int:
        return 0

    def needs_cudagraph_capture(self) -> bool:
        return False

    def _dummy_run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Called for data-parallel dummy batches: diffusion ranks do not run in lockstep, so there is nothing to do."""
        empty = torch.empty(0, device=self.device)
        return empty, empty

    def _dummy_pooler_run(self, hidden_states: torch.Tensor) -> None: ...

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None: ...

    def warming_up_model(self) -> None: ...

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT

    def pool(self) -> None: ...

    def take_draft_token_ids(self) -> None: ...

    def get_draft_model(self) -> None: ...

    def get_encoder_timing_stats(self) -> dict[str, Any]:
        return {}

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def reset_lora_state(self) -> None: ...

    def maybe_remove_all_loras(self, lora_config: Any) -> None: ...

    def list_loras(self) -> set[int]:
        return set()

    def add_lora(self, lora_request: Any) -> bool:
        raise NotImplementedError("the diffusion worker serves no LoRA adapters")

    def remove_lora(self, lora_id: int) -> bool:
        return False

    def pin_lora(self, lora_id: int) -> bool:
        return False
