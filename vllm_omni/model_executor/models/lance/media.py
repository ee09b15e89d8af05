# SPDX-License-Identifier: Apache-2.0
"""Resize images and clips of any size to the sizes that the model was trained on. Resizing runs on
the model's device.

Each preset has six sizes ("buckets") with different aspect ratios and about the same area. An image
is assigned to the bucket with the nearest aspect ratio. The image is center-cropped to this aspect
ratio and resized with antialiased bicubic filtering. For the vision tower, it is also cropped to
whole patches. Input clips can instead be resized with Qwen2-VL's method, which comes from
transformers.
"""

# T frames, H height, W width; sizes are (height, width) in pixels

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

from vllm_omni.model_executor.models.lance.config import DEFAULTS, FRAMES_PER_LATENT

Size = tuple[int, int]

_RATIOS = ((21, 9), (16, 9), (4, 3), (1, 1), (3, 4), (9, 16))
_STRIDE = 16
LATENT_MULTIPLE, VISION_MULTIPLE = 16, 28
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class SizePreset:
    """Areas of a preset's buckets, each given as the side length of a square with that area."""

    vae: int
    """Side length for the latent encoder, in pixels."""
    vit: int
    """Side length for the vision tower, in pixels."""


PRESETS = {
    "image_256res": SizePreset(256, 224),
    "video_192p": SizePreset(256, 224),
    "image_512res": SizePreset(512, 448),
    "image_768res": SizePreset(768, 672),
    "video_360p": SizePreset(480, 476),
    "video_480p": SizePreset(640, 616),
}


@cache
def buckets(side: int, multiple: int, max_side: int | None = None) -> tuple[Size, ...]:
    """Return a preset's six sizes.

    Args:
        side: Side length in pixels of a square with the same area as the buckets.
        multiple: Number of which all heights and widths are multiples (28 for the vision tower).
        max_side: Maximum height and width in pixels, or None for no limit.
    """
    sizes = []
    for wide, high in _RATIOS:
        short_part, long_part = min(wide, high), max(wide, high)
        short = _round(side * math.sqrt(short_part / long_part))
        long = _round(short * long_part / short_part)
        height, width = (short, long) if wide >= high else (long, short)
        if max_side is not None:
            height, width = min(height, max_side), min(width, max_side)
        sizes.append((height // multiple * multiple, width // multiple * multiple))
    return tuple(sizes)


def _round(length: float) -> int:
    return round(length / _STRIDE) * _STRIDE


def nearest_bucket(size: Size, sizes: tuple[Size, ...]) -> int:
    """Return the index of the bucket with the nearest width-to-height ratio."""
    ratio = size[1] / size[0]
    return min(range(len(sizes)), key=lambda index: abs(sizes[index][1] / sizes[index][0] - ratio))


def crop_box(size: Size, target: Size) -> tuple[int, int, int, int]:
    """Return the largest centred crop of `size` with the aspect ratio of `target`, as (top, left,
    height, width).
    """
    height, width = size
    ratio = target[1] / target[0]
    if width / height > ratio:
        cut = max(1, min(width, round(height * ratio)))
        return 0, (width - cut) // 2, height, cut
    cut = max(1, min(height, round(width / ratio)))
    return (height - cut) // 2, 0, cut, width


def fit(frames_THWC: torch.Tensor, resized: Size, final: Size | None = None) -> torch.Tensor:
    """Crop uint8 frames [T, H, W, 3] to the aspect ratio of `resized`, resize them, and centre-crop
    them to `final`.

    Resizing is bicubic with antialiasing, and values are rounded to integer levels, as in Pillow.

    Returns:
        Frames [3, T, h, w], fp32, with values from 0 to 255.
    """
    top, left, height, width = crop_box((frames_THWC.shape[1], frames_THWC.shape[2]), resized)
    window = frames_THWC[:, top : top + height, left : left + width].permute(0, 3, 1, 2).float()
    window = _resize(window, resized)
    if final is not None and final != resized:
        top, left = (resized[0] - final[0]) // 2, (resized[1] - final[1]) // 2
        window = window[:, :, top : top + final[0], left : left + final[1]]
    return window.transpose(0, 1)


def _resize(frames_TCHW: torch.Tensor, size: Size) -> torch.Tensor:
    if tuple(frames_TCHW.shape[2:]) == size:
        return frames_TCHW
    return (
        functional.interpolate(frames_TCHW, size=size, mode="bicubic", antialias=True)
        .round_()
        .clamp_(0, 255)
    )


def for_vae(frames_THWC: torch.Tensor, size: Size) -> torch.Tensor:
    """Convert uint8 frames to fp32 pixels [3, T, *size] in [-1, 1]."""
    return fit(frames_THWC, size) / 127.5 - 1


def for_vit(frames_THWC: torch.Tensor, preset: SizePreset | None) -> torch.Tensor:
    """Convert uint8 frames to fp32 pixels [3, T, h, w] for the vision tower. The pixels are
    normalised with the CLIP mean and standard deviation.

    `preset` determines the buckets. If it is None, the frames are scaled to Qwen2-VL's `smart_size`
    without cropping.
    """
    size = (frames_THWC.shape[1], frames_THWC.shape[2])
    if preset is None:
        pixels = (
            _resize(frames_THWC.permute(0, 3, 1, 2).float(), smart_size(size)).transpose(0, 1) / 255
        )
    else:
        resized = buckets(preset.vit, _STRIDE)
        index = nearest_bucket(size, resized)
        pixels = fit(frames_THWC, resized[index], buckets(preset.vit, VISION_MULTIPLE)[index]) / 255
    mean, std = (
        torch.tensor(values, device=pixels.device).view(3, 1, 1, 1)
        for values in (_CLIP_MEAN, _CLIP_STD)
    )
    return (pixels - mean) / std


@cache
def smart_limits() -> tuple[int, int]:
    """Return the minimum and maximum number of pixels in a frame that Qwen2-VL's video processor
    has resized.
    """
    # Imported lazily, because the command line uses only buckets.
    from transformers import Qwen2VLVideoProcessor

    return Qwen2VLVideoProcessor.size["shortest_edge"], Qwen2VLVideoProcessor.size["longest_edge"]


def smart_size(size: Size) -> Size:
    """Return the size that Qwen2-VL's video processor resizes a frame to.

    Raises:
        ValueError: The aspect ratio is greater than 200 to 1.
    """
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize

    fewest, most = smart_limits()
    height, width = smart_resize(*size, factor=VISION_MULTIPLE, min_pixels=fewest, max_pixels=most)
    return height, width


def sampled_frames(num_frames: int, fps: float | None) -> torch.Tensor:
    """Return the indices of a clip's frames that the model receives, int64. The selected frames are
    sampled at 12 frames per second and span at most 6 s. Their number is 4 k + 1.

    `fps` is the clip's frame rate. None: the clip is assumed to have 12 frames per second.
    """
    rate = DEFAULTS.fps if fps is None else round(fps)
    seconds = min(num_frames / max(1, rate), DEFAULTS.video_seconds)
    count = round(DEFAULTS.fps * seconds)
    retained = FRAMES_PER_LATENT * (count // FRAMES_PER_LATENT) + 1
    if count % FRAMES_PER_LATENT == 0:
        retained -= FRAMES_PER_LATENT
    retained = max(1, min(retained, num_frames))
    if fps is None:  # no resampling: use the first frames
        return torch.arange(min(retained, num_frames))
    return torch.linspace(0, num_frames - 1, retained, dtype=torch.float64).long()
