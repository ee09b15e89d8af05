# SPDX-License-Identifier: Apache-2.0
"""Describes the `lance` family for the command line, the config parser and the endpoints."""

from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import (
    SESSIONS_END_WITH_REQUEST,
    Capabilities,
    ImageSizes,
    Refusal,
    Refusals,
)
from vllm_omni.model_executor.models.lance.checkpoint import (
    LAYOUTS,
    hf_config,
    is_checkpoint,
    lance_config,
)
from vllm_omni.model_executor.models.lance.config import (
    DEFAULTS,
    FRAMES_PER_LATENT,
    PIXELS_PER_LATENT,
    LanceOptions,
)
from vllm_omni.model_executor.models.lance.sizes import default_size
from vllm_omni.model_executor.models.registry import ModelFamily


def _check_options(config: dict[str, Any], omni: OmniConfig) -> None:
    LanceOptions.parse(omni.model)
    lance_config(config["lance"])


def _capabilities(config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    """Return a checkpoint's capabilities. The video checkpoint also generates images, with a
    default size that differs from its video size.
    """
    options, lance = LanceOptions.parse(omni.model), lance_config(config["lance"])
    videos = lance.makes_video
    images, limit = default_size(False, options), options.max_image_pixels
    height, width = default_size(True, options) if videos else images
    longest = min(options.max_num_frames, lance.max_frames)
    readable = round(DEFAULTS.fps * DEFAULTS.video_seconds)
    if options.choices.understanding_video == "smart_resize":  # every frame is used
        readable = min(readable, options.max_num_frames)
    return Capabilities(
        tasks=(
            ("text_to_image", "image_edit", "text_to_video", "image_to_video", "video_edit")
            if videos
            else ("text_to_image", "image_edit")
        ),
        height=height,
        width=width,
        max_pixels=options.max_video_pixels if videos else limit,
        max_side=lance.max_side,
        pictures=ImageSizes(height=images[0], width=images[1], max_pixels=limit),
        size_multiple=(PIXELS_PER_LATENT, PIXELS_PER_LATENT),
        num_inference_steps=DEFAULTS.num_timesteps,
        guidance_scale=DEFAULTS.cfg_text_scale,
        negative_prompt=True,
        num_frames=min(DEFAULTS.num_frames, longest),
        max_num_frames=longest,
        frame_stride=FRAMES_PER_LATENT,
        fps=DEFAULTS.fps,
        images_per_request=4,
        reads=("image", "video"),
        read_frames=readable,
    )


FAMILY = ModelFamily(
    name="lance",
    title="Lance: image generation and editing, video generation, image and video understanding",
    architecture="LancePipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=LAYOUTS,
    check_options=_check_options,
    refusals=lambda hf_config, omni, stages: Refusals(
        pipeline_stages=Refusal(
            "its layers are not split over stages", "use --tensor-parallel-size"
        ),
        periodic_snapshots=SESSIONS_END_WITH_REQUEST,
    ),
    capabilities=_capabilities,
    takes_adapters=True,
)
