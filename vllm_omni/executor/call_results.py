# SPDX-License-Identifier: Apache-2.0
"""Converts a pipeline's output to the tensors of a result envelope.

The result is `images`, uint8 [N, H, W, 3], or `frames`, uint8 [T, H, W, 3]. Values are quantized on
the device before they are copied to the host. Quantization multiplies by 255 and rounds half to
even, as diffusers' `numpy_to_pil` does, so the bytes match those of `output_type="pil"`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# N images, B videos, T frames, C = 3 channels, H height, W width

_KEYS = ("images", "frames", "videos")


def result_tensors(output: Mapping[str, Any], *, video: bool) -> dict[str, torch.Tensor]:
    """Convert a pipeline's decoded output.

    Args:
        output: diffusers' output object (a mapping), which contains float tensors in [0, 1], float
            arrays, or PIL images.
        video: Whether the output is a video.

    Raises:
        TypeError: The output type is not supported. The message names the type.
    """
    value = _main_value(output)
    pixels = _to_uint8(value)
    if video:
        if pixels.dim() == 5 and pixels.shape[0] == 1:
            pixels = pixels[0]
        if pixels.dim() != 4:
            raise TypeError(f"expected one video [T, H, W, C], got shape {tuple(pixels.shape)}")
        return {"frames": _rgb(pixels)}
    if pixels.dim() != 4:
        raise TypeError(f"expected images [N, H, W, C], got shape {tuple(pixels.shape)}")
    return {"images": _rgb(pixels)}


def latents_tensor(output: Mapping[str, Any]) -> torch.Tensor:
    """Return the unmodified latents of a pipeline that was called with `output_type="latent"`."""
    value = _main_value(output)
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"the pipeline returned {type(value).__name__} for output_type='latent', not a tensor"
        )
    return value.contiguous()


def _main_value(output: Mapping[str, Any]) -> Any:
    for key in _KEYS:
        if key in output:
            return output[key]
    raise TypeError(
        f"the pipeline returned {', '.join(output) or 'nothing'}; supported: {', '.join(_KEYS)}"
    )


def _to_uint8(value: Any) -> torch.Tensor:
    """Convert images or frames to uint8 with channels last, on the device where they are stored."""
    if isinstance(value, torch.Tensor):
        pixels = (
            value if value.dtype == torch.uint8 else (value.float() * 255).round().to(torch.uint8)
        )
        return pixels.movedim(-3, -1)
    if isinstance(value, np.ndarray):
        array = (
            value
            if value.dtype == np.uint8
            else (value.astype(np.float32, copy=False) * 255).round()
        )
        return torch.from_numpy(array.astype(np.uint8))
    if isinstance(value, list) and value:
        if isinstance(value[0], list | torch.Tensor | np.ndarray):
            return torch.stack([_to_uint8(item) for item in value])
        return torch.stack([torch.from_numpy(np.array(image.convert("RGB"))) for image in value])
    raise TypeError(
        f"the pipeline returned {type(value).__name__}; supported: tensors, arrays and PIL images"
    )


def _rgb(pixels: torch.Tensor) -> torch.Tensor:
    channels = pixels.shape[-1]
    if channels not in (1, 3, 4):
        raise TypeError(f"the pipeline's images have {channels} channels, not 1, 3 or 4")
    return (pixels.expand(*pixels.shape[:-1], 3) if channels == 1 else pixels[..., :3]).contiguous()
