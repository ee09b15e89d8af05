# SPDX-License-Identifier: Apache-2.0
"""Download DreamX-World-5B (autoregressive), with the VAE, text encoder and tokenizer of
Wan2.2-TI2V-5B.

Download sizes are taken from the repositories' published file listings. The transformer's licence
is known only from third-party sources, which report that the model card states "mit". Users must
therefore accept the licence explicitly.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent, HubSource

_LICENCE = (
    "MIT by the card's metadata as third parties report it, and Apache-2.0 for the parts of "
    "Wan2.2-TI2V-5B: read both model cards"
)
PIECES = (
    HubComponent("GD-ML/DreamX-World-5B", ("model.safetensors",), "", 10.6),
    HubComponent(
        "Wan-AI/Wan2.2-TI2V-5B",
        ("google/umt5-xxl/*", "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.2_VAE.pth"),
        "",
        14.2,
    ),
)
RELEASES = {"dreamx_world": HubSource(PIECES, licence=_LICENCE)}


def check_complete(path: Path) -> None:
    """Raise ValueError if a component is missing or if the transformer's tensors have wrong names
    or shapes.

    The check reads only file names and headers. The tensors of the other components are checked
    when they are loaded.
    """
    from vllm_omni.model_executor.models.dreamx_world.checkpoint import (
        RULES,
        find_layout,
        transformer_shapes,
    )
    from vllm_omni.model_executor.models.dreamx_world.config import DreamXConfig

    layout = find_layout(path)
    layout.require("transformer", "vae", "text_encoder", "tokenizer")
    config = DreamXConfig.from_checkpoint(layout.transformer_config())
    layout.check_transformer(transformer_shapes(config), RULES)
