# SPDX-License-Identifier: Apache-2.0
"""The `null_image` family: detection, config and capabilities of `NullImagePipeline`."""

import json
from pathlib import Path
from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.model_executor.models.registry import ModelFamily

CAPABILITIES = Capabilities(
    tasks=("text_to_image", "image_edit", "text_to_video", "image_to_video"),
    size_multiple=(8, 8),
    num_inference_steps=4,
    guidance_scale=4.0,
    negative_prompt=True,
    num_frames=17,
    max_num_frames=241,
    frame_stride=4,
    fps=16.0,
    images_per_request=4,
    input_images=4,
    mask=True,
)


def _detect(path: Path) -> bool:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "null_image"


def _hf_config(path: Path) -> dict[str, Any]:
    return {
        "architectures": ["NullImagePipeline"],
        "dtype": "float32",
        "hidden_size": 4,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "max_position_embeddings": 16,
    }


def _capabilities(hf_config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    return CAPABILITIES


FAMILY = ModelFamily(
    name="null_image",
    title="Null image: images and videos without a model",
    architecture="NullImagePipeline",
    detect=_detect,
    hf_config=_hf_config,
    layouts=("original",),
    capabilities=_capabilities,
)
