# SPDX-License-Identifier: Apache-2.0
"""Describes the `waypoint` family for the command line, the config parser and the endpoints."""

from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Capabilities, Refusals
from vllm_omni.model_executor.models.wan.splits import check_parts
from vllm_omni.model_executor.models.waypoint.checkpoint import LAYOUTS, hf_config, is_checkpoint
from vllm_omni.model_executor.models.waypoint.config import (
    PRESETS,
    SIZE_MULTIPLE,
    WaypointStream,
    action_space,
    read_stream,
)
from vllm_omni.model_executor.models.waypoint.plan import PLAN
from vllm_omni.model_executor.streaming.family import streaming_family


def _check_parallel(stream: WaypointStream, omni: OmniConfig, ranks: int, stages: int) -> None:
    config = stream.config
    check_parts(
        config.n_layers,
        {"n_kv_heads": config.n_kv_heads},
        omni,
        ranks,
        stages,
        stages - omni.vae_stage,
    )


def _info(stream: WaypointStream) -> dict[str, Any]:
    stride = stream.plan.rate.later
    return {
        "fps": float(stream.config.inference_fps),
        "vae_stride": (stride, SIZE_MULTIPLE, SIZE_MULTIPLE),
        "latent_channels": stream.config.channels,
        "latent_size": stream.config.latent_shape[1:],
    }


FAMILY = streaming_family(
    name="waypoint",
    title="Waypoint 1 and 1.5: worlds played with keys, mouse and wheel",
    architecture="WaypointPipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=read_stream,
    presets=PRESETS,
    refusals=lambda stream, omni, stages: Refusals(vae_stage=None),
    check_parallel=_check_parallel,
    action_space=lambda stream: action_space(stream.config),
    info=lambda stream: {"patch_size": (1, 1, 1), **_info(stream)},
    capabilities=lambda config, omni: Capabilities(
        tasks=("world", "text_to_video", "image_to_video"),
        size_multiple=(SIZE_MULTIPLE, SIZE_MULTIPLE),
        fps=_info(read_stream(config["waypoint"], omni))["fps"],
    ),
    plan=PLAN,
)
