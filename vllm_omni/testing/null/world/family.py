# SPDX-License-Identifier: Apache-2.0
"""The `null_world` family: detection and config of `NullWorldPipeline`."""

import json
from pathlib import Path
from typing import Any

from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.model_executor.models.capabilities import Capabilities, Refusal, Refusals
from vllm_omni.model_executor.models.registry import ModelFamily
from vllm_omni.testing.null.world.options import NullWorldOptions


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


def _capabilities(hf_config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    return Capabilities(tasks=("world", "text_to_video", "image_to_video"))


def _options(omni: OmniConfig) -> NullWorldOptions:
    return parse_options(NullWorldOptions, omni.model, "omni.model")


def _check_options(hf_config: dict[str, Any], omni: OmniConfig) -> None:
    _options(omni)


FAMILY = ModelFamily(
    name="null_world",
    title="Null world: everything but a model",
    architecture="NullWorldPipeline",
    detect=_detect,
    hf_config=_hf_config,
    layouts=("original",),
    check_options=_check_options,
    refusals=lambda hf_config, omni, stages: Refusals(
        vae_stage=None,
        fewer_steps=None,
        tiny_vae=Refusal("it has neither a window nor a decoder"),
    ),
    action_space=lambda hf_config, omni: _options(omni).actions,
    capabilities=_capabilities,
)
