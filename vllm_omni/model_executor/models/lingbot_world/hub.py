# SPDX-License-Identifier: Apache-2.0
"""The pieces of a LingBot World checkpoint, and LingBot World Fast on the hub, put together in the original layout.

Sizes are those of the repositories' file lists. The licences of the weights are on their model cards.
"""

import json
from pathlib import Path

from vllm_omni.model_executor.hub import HubPiece

_TRANSFORMER = "lingbot_world_fast"

PIECES = (
    HubPiece(
        "robbyant/lingbot-world-base-cam",
        ("google/umt5-xxl/*", "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"),
        "",
        11.9,
    ),
    HubPiece("robbyant/lingbot-world-fast", ("*.safetensors", "*.json"), _TRANSFORMER, 74.2),
)

# Constructor values of the original network at its released size; the causal window is the released one.
_CONFIG = {
    "_class_name": "WanModelFast",
    "model_type": "i2v",
    "control_type": "cam",
    "dim": 5120,
    "ffn_dim": 13824,
    "freq_dim": 256,
    "in_dim": 36,
    "out_dim": 16,
    "num_heads": 40,
    "num_layers": 40,
    "text_len": 512,
    "eps": 1e-6,
    "sink_size": 9,
    "num_frames_per_block": 3,
    "sliding_window_num_frames": 18,
}


def check_complete(path: Path) -> None:
    """Raise ValueError unless every piece is there and the transformer's tensors have the right names and shapes.

    Only file names and headers are read. The other components' tensors are checked when they are loaded.
    """
    from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
    from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
    from vllm_omni.model_executor.models.lingbot_world.weights import transformer_shapes
    from vllm_omni.model_executor.tensor_files import open_tensors
    from vllm_omni.model_executor.weights import check_shapes

    layout = find_layout(path)
    layout.require("transformer", "vae", "text_encoder", "tokenizer")
    config = LingBotWorldConfig.from_checkpoint(layout.transformer_config())
    check_shapes(open_tensors(layout.transformer).shapes, transformer_shapes(config), str(layout.transformer))


def complete(out: Path) -> list[str]:
    """Write the transformer's `config.json` if its repository has none; returns the files written."""
    path = out / _TRANSFORMER / "config.json"
    if path.exists():
        return []
    path.write_text(json.dumps(_CONFIG, indent=2) + "\n")
    return [f"{_TRANSFORMER}/config.json"]
