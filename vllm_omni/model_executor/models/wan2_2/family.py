# SPDX-License-Identifier: Apache-2.0
"""Describes the `wan2_2` family to the command line, the config parser and the endpoints."""

from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import (
    SESSIONS_END_WITH_REQUEST,
    Capabilities,
    Refusals,
    Task,
)
from vllm_omni.model_executor.models.registry import ModelFamily
from vllm_omni.model_executor.models.wan.splits import check_split
from vllm_omni.model_executor.models.wan2_2.checkpoint import hf_config, is_checkpoint
from vllm_omni.model_executor.models.wan2_2.config import (
    Kind,
    Wan22Checkpoint,
    Wan22Config,
    Wan22Options,
    recommended,
)
from vllm_omni.model_executor.models.wan2_2.guidance import check_guidance_ranks
from vllm_omni.model_executor.models.wan2_2.request import default_guidance, default_num_frames

_TASKS: dict[Kind, tuple[Task, ...]] = {
    "t2v": ("text_to_video",),
    "i2v": ("image_to_video",),
    "ti2v": ("text_to_video", "image_to_video"),
}


def _check_options(config: dict[str, Any], omni: OmniConfig) -> None:
    Wan22Options.parse(omni.model)
    Wan22Checkpoint(**config["wan2_2"]["facts"]).latent_size(omni.height, omni.width)


def _check_parallel(config: dict[str, Any], omni: OmniConfig, ranks: int, stages: int) -> None:
    options = Wan22Options.parse(omni.model)
    if options.cfg_parallel:
        check_guidance_ranks(ranks)
        ranks = 1
    transformer = Wan22Config.from_checkpoint(config["wan2_2"]["transformer"])
    check_split(transformer, omni, ranks, stages, sequence_parallel=options.sequence_parallel)


def _capabilities(config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    checkpoint, options = (
        Wan22Checkpoint(**config["wan2_2"]["facts"]),
        Wan22Options.parse(omni.model),
    )
    best = recommended(checkpoint)
    return Capabilities(
        tasks=_TASKS[checkpoint.kind],
        size_multiple=(checkpoint.size_multiple, checkpoint.size_multiple),
        num_inference_steps=options.defaults.num_inference_steps or best.num_inference_steps,
        max_num_inference_steps=options.max_num_inference_steps,
        guidance_scale=default_guidance(checkpoint, options)[0],
        negative_prompt=True,
        num_frames=default_num_frames(checkpoint, options),
        max_num_frames=options.max_num_frames,
        frame_stride=checkpoint.temporal_factor,
        fps=options.defaults.fps or best.fps,
    )


FAMILY = ModelFamily(
    name="wan2_2",
    title="Wan 2.2: text-to-video, image-to-video and both (A14B, TI2V 5B), denoised step by step",
    architecture="Wan22Pipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=("t2v", "i2v", "ti2v"),
    check_options=_check_options,
    refusals=lambda hf_config, omni, stages: Refusals(
        vae_stage=None, periodic_snapshots=SESSIONS_END_WITH_REQUEST
    ),
    check_parallel=_check_parallel,
    capabilities=_capabilities,
    takes_adapters=True,
)
