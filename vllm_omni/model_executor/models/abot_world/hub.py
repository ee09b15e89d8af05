# SPDX-License-Identifier: Apache-2.0
"""Download ABot-World-0-5B-LF from the original repository, which contains all components.

Third-party sources list the licence of the weights as Apache-2.0. Read the model card before you
use the weights.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent

PIECES = (
    HubComponent(
        "acvlab/ABot-World-0-5B-LF",
        (
            "diffusion_pytorch_model.safetensors",
            "config.json",
            "Wan2.2_VAE.pth",
            "taew2_2.pth",
            "models_t5_umt5-xxl-enc-bf16.pth",
            "google/umt5-xxl/*",
        ),
        "",
        24.8,
    ),
)
"""Release files. The transformer takes up 10.5 GB, the VAE 2.8 GB and the text encoder 11.4 GB.
"""


def check_complete(path: Path) -> None:
    """Raise ValueError if a component is missing or if the transformer's tensors have wrong names
    or shapes.

    The check reads only file names and headers. The tensors of the other components are checked
    when they are loaded.
    """
    from vllm_omni.model_executor.models.abot_world.checkpoint import (
        RULES,
        find_layout,
        transformer_shapes,
    )
    from vllm_omni.model_executor.models.abot_world.config import AbotWorldConfig

    layout = find_layout(path)
    layout.require("transformer", "vae", "text_encoder", "tokenizer")
    config = AbotWorldConfig.from_checkpoint(layout.transformer_config())
    layout.check_transformer(transformer_shapes(config), RULES)
