# SPDX-License-Identifier: Apache-2.0
"""The pieces of a causal Wan checkpoint: Self-Forcing's 1.3B network in a Wan 2.1 T2V directory.

Sizes are estimates from the tensors' sizes. The licences of the weights are on their model cards.
"""

from pathlib import Path

from vllm_omni.model_executor.hub import HubPiece

PIECES = (
    HubPiece(
        "Wan-AI/Wan2.1-T2V-1.3B",
        ("google/umt5-xxl/*", "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth", "config.json"),
        "",
        11.9,
    ),
    HubPiece("gdhe17/Self-Forcing", ("checkpoints/self_forcing_dmd.pt",), "", 5.7),
)


def check_complete(path: Path) -> None:
    """Raise ValueError unless every piece is there and the transformer's tensors have the right names and shapes.

    Only file names and headers are read. The other components' tensors are checked when they are loaded.
    """
    from vllm_omni.model_executor.models.causal_wan.checkpoint import find_layout, open_transformer
    from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
    from vllm_omni.model_executor.models.wan.transformer_weights import TRANSFORMER_RULES, transformer_shapes
    from vllm_omni.model_executor.weights import check_shapes, rename

    layout = find_layout(path)
    layout.require("transformer", "vae", "text_encoder", "tokenizer")
    config = CausalWanConfig.from_checkpoint(layout.transformer_config())
    found = open_transformer(layout.transformer).shapes
    renamed = {rename(name, TRANSFORMER_RULES): shape for name, shape in found.items()}
    check_shapes(renamed, transformer_shapes(config), str(layout.transformer))
