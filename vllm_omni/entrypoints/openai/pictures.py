# SPDX-License-Identifier: Apache-2.0
"""Pictures between files and arrays: client uploads and replies.

Uploads are read by `realtime/images.py` (format and size from the header before a pixel is decoded). All of it takes
milliseconds of CPU: call it off the event loop. Held by tests/entrypoints/openai/test_openai_parts.py.
"""

import io
from typing import Any, Final

import numpy as np
from PIL import Image, ImageOps

from vllm_omni.entrypoints.openai.errors import ApiError, from_failure, invalid
from vllm_omni.entrypoints.openai.protocol import Format
from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.realtime.images import FORMATS, load_image, read_picture
from vllm_omni.entrypoints.realtime.limits import DoorLimits

MEDIA_TYPES: Final[dict[str, str]] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_QUALITY: Final = {"low": 60, "medium": 80, "standard": 80}
_BEST_QUALITY: Final = 95


def read_upload(source: Any, param: str, limits: DoorLimits) -> np.ndarray:
    """An uploaded file, or a `data:` URL, as uint8 RGB `[H, W, 3]` in its own size. Raises `ApiError` 400."""
    try:
        return np.asarray(read_picture(source, limits)).copy()
    except DoorError as error:
        raise _refused(error, param) from None


def read_start_image(source: Any, height: int, width: int, limits: DoorLimits) -> np.ndarray:
    """Likewise, stretched to a video's size."""
    try:
        return load_image(source, height, width, limits)
    except DoorError as error:
        raise _refused(error, "input_reference") from None


def read_mask(data: bytes, height: int, width: int, limits: DoorLimits) -> np.ndarray:
    """An edit's mask as uint8 `[H, W]`, 255 where the upload is transparent (paint here). Raises `ApiError` 400.

    The file is a PNG or WebP with an alpha channel, of the picture's size.
    """
    shown = read_upload(data, "mask", limits)  # refuses non-images and oversized ones before the alpha is decoded
    if shown.shape[:2] != (height, width):
        raise invalid(
            f"mask is {shown.shape[1]}x{shown.shape[0]}, the image {width}x{height}: they must be equal", "mask"
        )
    with Image.open(io.BytesIO(data), formats=FORMATS) as picture:  # as `read_upload` opened it
        if not picture.has_transparency_data:
            raise invalid("mask has no alpha channel: make it transparent where the image is to be edited", "mask")
        alpha = np.asarray(ImageOps.exif_transpose(picture).convert("RGBA").getchannel("A"))
    return np.where(alpha < 128, 255, 0).astype(np.uint8)


def _refused(error: DoorError, param: str) -> ApiError:
    refusal = from_failure(error)
    refusal.param = param
    return refusal


def encode_picture(image_HWC: np.ndarray, output_format: Format, compression: int | None, quality: str | None) -> bytes:
    """One picture as a file. compression: OpenAI's `output_compression`, 0-100, of jpeg and webp; wins over quality."""
    buffer = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(image_HWC))
    if output_format == "png":
        picture.save(buffer, "PNG", compress_level=3)
    else:
        level = _QUALITY.get(quality or "", _BEST_QUALITY) if compression is None else compression
        picture.save(buffer, output_format.upper(), quality=level)
    return buffer.getvalue()
