# SPDX-License-Identifier: Apache-2.0
"""Builds an `AdapterStore` for a model that a test drives without an engine."""

from collections.abc import Mapping
from pathlib import Path

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from vllm_omni.model_executor.layers.lora.store import AdapterStore
from vllm_omni.model_executor.layers.lora.target import SupportsAdapters


def make_store(
    model: SupportsAdapters,
    adapters: Mapping[str, Path] | None = None,
    *,
    max_loras: int = 2,
    max_cpu_loras: int = 4,
    max_rank: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> AdapterStore:
    """Return an adapter store for a model's layers, with the given adapters loaded.

    Args:
        adapters: File or directory of each adapter, by name.
    """
    config = LoRAConfig(
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        max_lora_rank=max_rank,  # type: ignore[arg-type]
        lora_dtype=dtype,
    )
    store = AdapterStore(model.adapter_targets(), config, torch.device(device))
    for number, (name, path) in enumerate((adapters or {}).items(), start=1):
        store.add_adapter(LoRARequest(name, number, str(path)))
    return store
