# SPDX-License-Identifier: Apache-2.0
"""The `null_world` family: detection, config and the (tiny) checkpoint of `NullWorldPipeline`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.model_executor.models.registry import ModelFamily

_CONFIG = {"model_type": "null_world", "num_layers": 4}


def _detect(path: Path) -> bool:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "null_world"


def _hf_config(path: Path) -> dict[str, Any]:
    return {
        "architectures": ["NullWorldPipeline"],
        "dtype": "float32",
        "hidden_size": 4,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 8,
        "max_position_embeddings": 16,
    }


def _make_tiny(out: Path, seed: int, layout: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(_CONFIG))
    gain = 0.5 + torch.rand(4, generator=torch.Generator().manual_seed(seed))
    save_file({"gain": gain}, out / "model.safetensors")


def _capabilities(hf_config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    return Capabilities(tasks=("world", "text_to_video", "image_to_video"))


FAMILY = ModelFamily(
    name="null_world",
    title="Null world: everything but a model",
    architecture="NullWorldPipeline",
    detect=_detect,
    hf_config=_hf_config,
    make_tiny=_make_tiny,
    layouts=("original",),
    capabilities=_capabilities,
)
