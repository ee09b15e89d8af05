# SPDX-License-Identifier: Apache-2.0
"""Loads a Wan directory in diffusers' layout strictly: one or two transformers, the VAE and the
text encoder.

The tensor names and shapes of a component are compared with the expected ones before any of its
data is read (`model_executor/checkpoint/loading.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_omni.model_executor.checkpoint.loading import load_strict, shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_components
from vllm_omni.model_executor.models.wan.text_encoder.encoder import AwaitedText, TextEncoder
from vllm_omni.model_executor.models.wan.transformer.weights import (
    TRANSFORMER_RULES,
    transformer_shapes,
)
from vllm_omni.model_executor.models.wan2_2.checkpoint import Wan22Layout
from vllm_omni.model_executor.models.wan2_2.config import Wan22Config
from vllm_omni.model_executor.models.wan2_2.vae import VideoVAE


def load_transformer(transformer: nn.Module, folder: Path, config: Wan22Config) -> None:
    """Load a transformer's weights. Only this rank's layers and shards are loaded."""
    load_strict(
        transformer,
        open_tensors(folder),
        transformer_shapes(config),
        TRANSFORMER_RULES,
        what=folder.name,
    )


def load_vae(vae: VideoVAE, folder: Path, values: dict[str, Any]) -> None:
    with torch.device("meta"):
        whole = VideoVAE(values).network
    load_strict(vae.network, open_tensors(folder), shapes_of(whole), what="VAE")
    vae.clear_derived()


def load_pipeline_weights(
    layout: Wan22Layout,
    config: Wan22Config,
    experts: dict[str, nn.Module],
    vae: VideoVAE | None,
    text_encoder: TextEncoder | AwaitedText | None,
) -> None:
    """Check that all components that this rank needs exist, and load them.

    Raises:
        ValueError: A component is missing or does not match the model.
    """
    if text_encoder is not None:
        layout.require("text_encoder", "tokenizer")
    layout.require("transformer")
    if vae is not None:
        layout.require("vae")
    folders = {"transformer": layout.transformer, "transformer_2": layout.transformer_2}
    for name, transformer in experts.items():
        folder = folders[name]
        assert folder is not None
        load_transformer(transformer, folder, config)
    if vae is not None:
        assert layout.vae is not None
        load_vae(vae, layout.vae, layout.vae_values())
    load_components(layout, text_encoder=text_encoder)


_FILE_MARKS = {
    "transformer": r"high_?noise|(?<![a-z])high(?![a-z])",
    "transformer_2": r"low_?noise|(?<![a-z])low(?![a-z])",
}


def adapter_targets(
    experts: Mapping[str, nn.Module], config: Wan22Config
) -> dict[str, AdapterTarget]:
    """Return the experts as LoRA adapter targets. If there are two experts, an adapter's file name
    can identify the expert that the adapter belongs to.
    """
    # Imported here, because code that only describes a checkpoint does not need this module.
    from vllm_omni.model_executor.models.wan.transformer.layers import PatchEmbedding

    marks = _FILE_MARKS if len(experts) > 1 else {}
    return {
        name: AdapterTarget(
            expert,
            transformer_shapes(config),
            TRANSFORMER_RULES,
            linear_types=(PatchEmbedding,),
            file_mark=marks.get(name),
        )
        for name, expert in experts.items()
    }
