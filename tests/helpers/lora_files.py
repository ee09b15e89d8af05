# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters for a tiny network, written in each supported naming convention.

Other helpers return the weight changes that the adapters represent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vllm_omni.model_executor.checkpoint.loading import rename
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import hf_config
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.transformer.weights import (
    TRANSFORMER_RULES,
    transformer_shapes,
)
from vllm_omni.testing.tiny.wan import DIFFUSERS_NAMES

RANK, ALPHA = 4, 2.0
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""LoRA factors (down, up), by module. Shapes: [r, I] and [O, r]."""


def factors(
    target: AdapterTarget, modules: Sequence[str], seed: int, rank: int = RANK, size: float = 0.3
) -> Factors:
    """Return random low-rank factors. With a scale of ALPHA / rank, they change a layer's output by
    a few percent.
    """
    generator = torch.Generator().manual_seed(seed)
    made: Factors = {}
    for module in modules:
        matrix = target.matrix(module)
        assert matrix is not None, module
        outputs, inputs = matrix
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        made[module] = down, size * torch.randn(outputs, rank, generator=generator)
    return made


def attention_and_ffn(target: AdapterTarget) -> list[str]:
    """Return the names of the attention and feed-forward layers in every block."""
    return [
        name
        for name in target.matrices()
        if ".self_attn." in name or ".cross_attn." in name or ".ffn." in name
    ]


def differences(made: Factors, scaling: float) -> dict[str, torch.Tensor]:
    return {f"{module}.weight": scaling * up @ down for module, (down, up) in made.items()}


def merge(network: nn.Module, changes: Mapping[str, torch.Tensor]) -> None:
    """Add weight changes to a network. The weight names are those in the checkpoint."""
    slots = checkpoint_slots(network)
    for name, change in changes.items():
        slot = slots[name]
        slot.load(slot.target.clone().reshape(slot.shape) + change.reshape(slot.shape))


def write_community(made: Factors, path: Path, prefix: str = "diffusion_model.") -> Path:
    """Write an adapter in the naming convention of ComfyUI and other tools: lora_down, lora_up and
    alpha.
    """
    return _write(made, path, lambda module: prefix + module, ("lora_down", "lora_up"), alpha=True)


def write_community_ab(made: Factors, path: Path) -> Path:
    """Write an adapter with lora_A and lora_B but without alpha, as some tools do."""
    return _write(
        made, path, lambda module: f"diffusion_model.{module}", ("lora_A", "lora_B"), alpha=False
    )


def write_kohya(made: Factors, path: Path) -> Path:
    return _write(
        made,
        path,
        lambda m: f"lora_unet_{m.replace('.', '_')}",
        ("lora_down", "lora_up"),
        alpha=True,
    )


def write_diffusers(made: Factors, folder: Path, settings: Mapping[str, Any] | None = None) -> Path:
    """Write an adapter with diffusers' tensor names. If PEFT settings are given, the file's
    metadata contains them.
    """
    metadata = {} if settings is None else {"lora_adapter_metadata": json.dumps(dict(settings))}
    folder.mkdir(parents=True, exist_ok=True)
    return _write(
        made,
        folder / "pytorch_lora_weights.safetensors",
        lambda module: (
            "transformer." + rename(f"{module}.weight", DIFFUSERS_NAMES).removesuffix(".weight")
        ),
        ("lora_A", "lora_B"),
        alpha=False,
        metadata=metadata,
    ).parent


def write_peft(made: Factors, folder: Path, **settings: Any) -> Path:
    """Write an adapter folder as `PeftModel.save_pretrained` does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q"],
        "bias": "none",
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    path = folder / "adapter_model.safetensors"
    return _write(
        made, path, lambda m: f"base_model.model.{m}", ("lora_A", "lora_B"), alpha=False
    ).parent


def _write(
    made: Factors,
    path: Path,
    named: Callable[[str], str],
    halves: tuple[str, str],
    *,
    alpha: bool,
    metadata: dict[str, str] | None = None,
) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for module, (down, up) in made.items():
        tensors[f"{named(module)}.{halves[0]}.weight"] = down.contiguous()
        tensors[f"{named(module)}.{halves[1]}.weight"] = up.contiguous()
        if alpha:
            tensors[f"{named(module)}.alpha"] = torch.tensor(ALPHA)
    save_file(tensors, path, metadata=metadata)
    return path


def causal_wan_target(checkpoint: Path) -> AdapterTarget:
    """Return the layers of a causal Wan checkpoint that adapters can change. No weights are
    loaded.
    """
    config = CausalWanConfig.from_checkpoint(hf_config(checkpoint)["causal_wan"]["transformer"])
    return AdapterTarget(nn.Module(), transformer_shapes(config), TRANSFORMER_RULES)


def write_causal_wan(checkpoint: Path, path: Path, seed: int, rank: int = RANK) -> Path:
    """Write a random adapter for every layer in a causal Wan checkpoint's blocks."""
    target = causal_wan_target(checkpoint)
    return write_community(factors(target, attention_and_ffn(target), seed, rank), path)
