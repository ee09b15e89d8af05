# SPDX-License-Identifier: Apache-2.0
"""Download of ABot-World-0-5B-LF from the original repository, which contains all components.

According to third parties, the licence of the weights is Apache-2.0. Read the model card before
use.
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
"""Files of the release. The transformer takes up 10.5 GB, the VAE 2.8 GB and the text encoder 11.4
GB.
"""


def check_complete(path: Path) -> None:
    """Raise ValueError unless all components exist and the transformer's tensors have the right
    names and shapes.

    Only file names and headers are read. The tensors of the other components are checked when they
    are loaded.
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
