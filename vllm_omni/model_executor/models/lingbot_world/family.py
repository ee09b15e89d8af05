# SPDX-License-Identifier: Apache-2.0
"""The `lingbot_world` family: what the command line and the config parser ask about it."""

from pathlib import Path
from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.lingbot_world.checkpoint import LAYOUTS, hf_config, is_checkpoint
from vllm_omni.model_executor.models.lingbot_world.config import (
    ACTION_FOCAL,
    NATIVE_HEIGHT,
    NATIVE_WIDTH,
    ChunkPlan,
    LingBotOptions,
    LingBotWorldConfig,
)
from vllm_omni.model_executor.models.registry import ModelFamily
from vllm_omni.model_executor.models.wan.chunk_plan import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.models.wan.splits import check_split


def _make_tiny(out: Path, seed: int, layout: str) -> None:
    from vllm_omni.model_executor.models.lingbot_world.tiny import make_tiny  # transformers and diffusers

    make_tiny(out, seed, layout)


def _verify(golden: Path) -> Any:
    from vllm_omni.model_executor.models.lingbot_world import parity

    return parity.verify(golden)


def _plan(config: dict[str, Any], omni: OmniConfig) -> tuple[LingBotWorldConfig, ChunkPlan]:
    options = LingBotOptions.parse(omni.model, config["lingbot_world"]["version"])
    transformer = LingBotWorldConfig.from_checkpoint(config["lingbot_world"]["transformer"])
    return transformer, ChunkPlan.resolve(transformer, options)


def _check_options(config: dict[str, Any], omni: OmniConfig) -> None:
    transformer, _ = _plan(config, omni)
    transformer.latent_size(omni.height, omni.width)
    omni.refuse_degradations("LingBot World")


def _check_parallel(config: dict[str, Any], omni: OmniConfig, ranks: int, stages: int) -> None:
    transformer, _ = _plan(config, omni)
    options = LingBotOptions.parse(omni.model, config["lingbot_world"]["version"])
    omni.refuse_chunks_in_flight("LingBot World")
    check_split(transformer, omni, ranks, stages, sequence_parallel=options.sequence_parallel)


def _world_facts(config: dict[str, Any], omni: OmniConfig) -> dict[str, Any]:
    _, plan = _plan(config, omni)
    return {
        "latent_frames_per_chunk": plan.chunk_frames,
        "first_chunk_latent_frames": plan.first_chunk_frames,
        "vae_stride": (VAE_TEMPORAL, VAE_SPATIAL, VAE_SPATIAL),
        "intrinsics_reference_size": (NATIVE_WIDTH, NATIVE_HEIGHT),
        "key_focal": ACTION_FOCAL,
    }


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
    check_parallel=_check_parallel,
    world_facts=_world_facts,
)
