# SPDX-License-Identifier: Apache-2.0
"""The `lingbot_world` family: what the command line and the config parser ask about it."""

from pathlib import Path
from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.lingbot_world.checkpoint import LAYOUTS, hf_config, is_checkpoint
from vllm_omni.model_executor.models.lingbot_world.config import ChunkPlan, LingBotOptions, LingBotWorldConfig
from vllm_omni.model_executor.models.registry import ModelFamily


def _make_tiny(out: Path, seed: int, layout: str) -> None:
    from vllm_omni.model_executor.models.lingbot_world.tiny import make_tiny  # transformers and diffusers

    make_tiny(out, seed, layout)


def _verify(golden: Path) -> Any:
    from vllm_omni.model_executor.models.lingbot_world import parity

    return parity.verify(golden)


def _check_options(config: dict[str, Any], omni: OmniConfig) -> None:
    options = LingBotOptions.parse(omni.model, config["lingbot_world"]["version"])
    transformer = LingBotWorldConfig.from_checkpoint(config["lingbot_world"]["transformer"])
    ChunkPlan.resolve(transformer, options)
    transformer.latent_size(omni.height, omni.width)


FAMILY = ModelFamily(
    name="lingbot_world",
    title="LingBot World Fast: causal, camera-controlled image-to-video",
    architecture="LingBotWorldPipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    make_tiny=_make_tiny,
    layouts=LAYOUTS,
    verify=_verify,
    check_options=_check_options,
)
