# SPDX-License-Identifier: Apache-2.0
"""Bytes that an operator gives to sessions are what they get."""

from types import SimpleNamespace

import pytest
import torch

from vllm_omni.worker.memory import MemoryBudget

MIB = 1 << 20


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_cache_memory_bytes_is_the_budget(device: str) -> None:
    """`--kv-cache-memory-bytes` overrides the share of the device, as in vLLM; `omni.max_session_bytes` may be less."""
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=8 * MIB, gpu_memory_utilization=0.9))
    budget = MemoryBudget(config, torch.device(device))  # type: ignore[arg-type]
    assert budget.session_bytes(MIB, None) == 8 * MIB
    assert budget.session_bytes(MIB, 2 * MIB) == 2 * MIB
    with pytest.raises(ValueError, match=r"needs 0.01 GiB, but sessions may hold 0.01 GiB"):
        budget.session_bytes(9 * MIB, None)
