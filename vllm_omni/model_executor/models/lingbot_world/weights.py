# SPDX-License-Identifier: Apache-2.0
"""Tensor names and shapes of a LingBot World transformer, and strict loading.

All names and shapes in the files are compared with the expected ones before any data is read
(`model_executor/checkpoint/loading.py`, `wan/checkpoint/loading.py`). `checkpoint.py` locates the
files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vllm_omni.model_executor.checkpoint.loading import load_strict
from vllm_omni.model_executor.checkpoint.tensor_files import Shape, open_tensors
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.lingbot_world.config import (
    CONTROL_CHANNELS,
    LingBotWorldConfig,
)
from vllm_omni.model_executor.models.lingbot_world.world_pose import WORLD_FEATURES
from vllm_omni.model_executor.models.wan.transformer import weights as wan
from vllm_omni.model_executor.models.wan.transformer.weights import Sizes
from vllm_omni.model_executor.models.wan.vae.latents import VAE_SPATIAL

CAMERA_TENSOR = "patch_embedding_wancamctrl.weight"
"""Name of a tensor that LingBot World transformers have but other Wan transformers do not."""

TRANSFORMER_TENSORS: dict[str, Sizes] = {
    # For a given seed, the order of the entries determines the random values of each tensor in a
    # tiny checkpoint. The camera tensors come immediately after the patch embedding.
    **{
        name: shape
        for name, shape in wan.TRANSFORMER_TENSORS.items()
        if name.startswith("patch_embedding.")
    },
    CAMERA_TENSOR: ("D", "C"),
    "patch_embedding_wancamctrl.bias": ("D",),
    "c2ws_hidden_states_layer1.weight": ("D", "D"),
    "c2ws_hidden_states_layer1.bias": ("D",),
    "c2ws_hidden_states_layer2.weight": ("D", "D"),
    "c2ws_hidden_states_layer2.bias": ("D",),
    **wan.TRANSFORMER_TENSORS,
}
"""Tensors outside the blocks: those that every Wan transformer has, and the camera tensors. C is
the number of folded camera channels.
"""

WORLD_TENSORS: dict[str, Sizes] = {
    "world_pose_layer1.weight": ("D", "W"),
    "world_pose_layer1.bias": ("D",),
    "world_pose_layer2.weight": ("D", "D"),
    "world_pose_layer2.bias": ("D",),
}
"""Additional tensors of a `world` model. W is the number of world pose features."""

_FOLD = (2 * VAE_SPATIAL) ** 2
"""Number of pixels per token. Each control channel contributes one input per pixel."""

BLOCK_TENSORS: dict[str, Sizes] = {
    **wan.BLOCK_TENSORS,
    **{
        f"{layer}.{kind}": ("D", "D") if kind == "weight" else ("D",)
        for layer in (
            "cam_injector_layer1",
            "cam_injector_layer2",
            "cam_scale_layer",
            "cam_shift_layer",
        )
        for kind in ("weight", "bias")
    },
}
"""Tensors of each block: those that every Wan transformer has, and the camera tensors."""


def transformer_shapes(config: LingBotWorldConfig) -> dict[str, Shape]:
    """Return the shape of every tensor in a transformer with this architecture, keyed by name. The
    released v1 model has 1421 tensors.
    """
    patch = config.patch_size[1] * config.patch_size[2]
    outside = (
        {**TRANSFORMER_TENSORS, **WORLD_TENSORS}
        if config.control_type == "world"
        else TRANSFORMER_TENSORS
    )
    sizes = {"C": config.camera_channels * patch, "W": WORLD_FEATURES}
    return wan.network_shapes(config, outside, BLOCK_TENSORS, **sizes)


def config_of_tensors(
    shapes: Mapping[str, Shape], where: str, num_heads: int | None = None
) -> dict[str, Any]:
    """Derive the network's dimensions and the control type from tensor shapes, and return them
    under the original's `config.json` keys.

    Raises:
        ValueError: The tensors do not belong to a LingBot World transformer, or the number of heads
            is unknown.
    """
    sizes = wan.stored_sizes(shapes, where, num_heads)
    folded = shapes.get(CAMERA_TENSOR, (0, 0))[-1]
    control = next(
        (name for name, channels in CONTROL_CHANNELS.items() if channels * _FOLD == folded), None
    )
    if control is None:
        allowed = ", ".join(
            f"{channels * _FOLD} ({name})" for name, channels in CONTROL_CHANNELS.items()
        )
        raise ValueError(f"{where}: {CAMERA_TENSOR} takes {folded} inputs; known: {allowed}")
    return {**sizes, "control_type": "world" if WORLD_TENSORS.keys() <= shapes.keys() else control}


def load_transformer(transformer: nn.Module, path: Path, config: LingBotWorldConfig) -> None:
    """Load the transformer's weights from safetensors files. Only this rank's layers and shards are
    loaded.
    """
    load_strict(transformer, open_tensors(path), transformer_shapes(config), what="transformer")


def adapter_target(transformer: nn.Module, config: LingBotWorldConfig) -> AdapterTarget:
    """Return the transformer as an `AdapterTarget` for LoRA adapters."""
    # Imported here, because code that only describes a checkpoint does not need this module.
    from vllm_omni.model_executor.models.wan.transformer.layers import PatchEmbedding

    return AdapterTarget(
        transformer,
        transformer_shapes(config),
        wan.TRANSFORMER_RULES,
        linear_types=(PatchEmbedding,),
    )
