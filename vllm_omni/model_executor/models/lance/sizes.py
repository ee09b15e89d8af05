# SPDX-License-Identifier: Apache-2.0
"""Determine the latent grid of a generated image or video from the requested size, the server's
default, or a reference's bucket.

If a size exceeds the position table or the server's limits, the error lists the allowed sizes.
"""

import math

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.lance.config import (
    DEFAULTS,
    FRAMES_PER_LATENT,
    PIXELS_PER_LATENT,
    VIDEO_TASKS,
    LanceConfig,
    LanceOptions,
    Task,
)
from vllm_omni.model_executor.models.lance.media import (
    LATENT_MULTIPLE,
    PRESETS,
    Size,
    SizePreset,
    buckets,
    nearest_bucket,
)
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import Grid
from vllm_omni.outputs import RequestFailed


def generation_grid(
    params: DiffusionParams, task: Task, config: LanceConfig, served: LanceOptions
) -> Grid:
    """Return the latent grid for a request without a reference.

    Raises:
        RequestFailed: The size is not supported (`unsupported_size`).
    """
    video = task in VIDEO_TASKS
    height, width = default_size(video, served)
    height = height if params.height is None else params.height
    width = width if params.width is None else params.width
    limit = served.max_video_pixels if video else served.max_image_pixels
    if (
        height % PIXELS_PER_LATENT
        or width % PIXELS_PER_LATENT
        or max(height, width) > config.max_side
    ):
        raise _size(height, width, video, config, limit)
    if height * width > limit:
        raise _size(height, width, video, config, limit)
    if not video:
        return 1, height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT
    longest = min(served.max_num_frames, config.max_frames)
    frames = min(DEFAULTS.num_frames, longest) if params.num_frames is None else params.num_frames
    if frames > longest:
        raise RequestFailed(
            "unsupported_size",
            f"num_frames {frames} is above {longest}; a video has 1 + {FRAMES_PER_LATENT} k "
            "frames, others are rounded "
            "down",
        )
    latent_frames = 1 + (frames - 1) // FRAMES_PER_LATENT
    return latent_frames, height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT


def default_size(video: bool, served: LanceOptions) -> Size:
    """Return the released model's default size or, if this server does not allow that size, the
    largest square that the server allows.
    """
    size, limit = (
        (DEFAULTS.video_size, served.max_video_pixels)
        if video
        else (DEFAULTS.image_size, served.max_image_pixels)
    )
    if size[0] * size[1] <= limit:
        return size
    side = math.isqrt(limit) // PIXELS_PER_LATENT * PIXELS_PER_LATENT
    return side, side


def _size(height: int, width: int, video: bool, config: LanceConfig, limit: int) -> RequestFailed:
    preset = PRESETS["video_480p" if video else "image_768res"]
    trained = ", ".join(
        f"{w}x{h}" for h, w in buckets(preset.vae, LATENT_MULTIPLE, config.max_side)
    )
    return RequestFailed(
        "unsupported_size",
        f"{width}x{height} arrived; width and height must be multiples of {PIXELS_PER_LATENT} from "
        f"{PIXELS_PER_LATENT} "
        f"to {config.max_side} with at most {limit} pixels, e.g. {trained}",
    )


def reference_grid(shape: tuple[int, ...], preset: SizePreset, config: LanceConfig) -> Grid:
    """Return the latent grid of the bucket nearest to a reference of shape [T, H, W, 3]."""
    sizes = buckets(preset.vae, LATENT_MULTIPLE, config.max_side)
    height, width = sizes[nearest_bucket((shape[1], shape[2]), sizes)]
    return (
        1 + (shape[0] - 1) // FRAMES_PER_LATENT,
        height // PIXELS_PER_LATENT,
        width // PIXELS_PER_LATENT,
    )
