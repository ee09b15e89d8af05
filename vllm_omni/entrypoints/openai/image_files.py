# SPDX-License-Identifier: Apache-2.0
"""Convert between image files and arrays, for uploads and replies.

Uploads are read by `connection/images.py`, which checks the format and size in the header before it
decodes pixels. Each function in this module takes a few milliseconds of CPU time, so call it on a
worker thread.
"""

import io
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from PIL import Image, ImageOps

from vllm_omni.entrypoints.errors import ApiError, EndpointError, from_failure, invalid
from vllm_omni.entrypoints.openai.protocol import Format
from vllm_omni.entrypoints.realtime.connection.images import (
    FORMATS,
    load_image,
    load_named_images,
    read_image,
)
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits

MEDIA_TYPES: Final[dict[str, str]] = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
}
_QUALITY: Final = {"low": 60, "medium": 80, "standard": 80}
_BEST_QUALITY: Final = 95


def read_upload(source: Any, param: str, limits: EndpointLimits) -> np.ndarray:
    """Return an uploaded file or `data:` URL as uint8 RGB `[H, W, 3]` at its original size.

    Raises:
        ApiError: Status 400 if the image is invalid or too large.
    """
    try:
        return np.asarray(read_image(source, limits)).copy()
    except EndpointError as error:
        raise _refused(error, param) from None


def read_start_image(source: Any, height: int, width: int, limits: EndpointLimits) -> np.ndarray:
    """Return a start image, stretched to the size of a video.

    Raises:
        ApiError: Status 400 if the image is invalid or too large.
    """
    try:
        return load_image(source, height, width, limits)
    except EndpointError as error:
        raise _refused(error, "input_reference") from None


def read_named_images(sources: Mapping[str, Any], limits: EndpointLimits) -> dict[str, np.ndarray]:
    """Return named images at their original sizes, as input tensors for a request.

    Raises:
        ApiError: Status 400 if an image is invalid or too large.
    """
    try:
        return load_named_images(sources, limits)
    except EndpointError as error:
        raise _refused(error, error.param or "images") from None


def read_mask(data: bytes, height: int, width: int, limits: EndpointLimits) -> np.ndarray:
    """Return an edit's mask as uint8 `[H, W]`.

    The value 255 marks pixels to edit, which are transparent in the uploaded file. The file must be
    a PNG or WebP with an alpha channel and have the same size as the image.

    Raises:
        ApiError: Status 400 if the mask is invalid or its size differs from the image's.
    """
    # `read_upload` refuses invalid and oversized files before the alpha channel is decoded.
    shown = read_upload(data, "mask", limits)
    if shown.shape[:2] != (height, width):
        raise invalid(
            f"mask is {shown.shape[1]}x{shown.shape[0]}, the image {width}x{height}: they must be "
            "equal",
            "mask",
        )
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:  # as `read_image` opened it
        if not image.has_transparency_data:
            raise invalid(
                "mask has no alpha channel: make it transparent where the image is to be edited",
                "mask",
            )
        alpha = np.asarray(ImageOps.exif_transpose(image).convert("RGBA").getchannel("A"))
    return np.where(alpha < 128, 255, 0).astype(np.uint8)


def _refused(error: EndpointError, param: str) -> ApiError:
    refusal = from_failure(error)
    refusal.param = param
    return refusal


def encode_image_file(
    image_HWC: np.ndarray, output_format: Format, compression: int | None, quality: str | None
) -> bytes:
    """Encode one image.

    Args:
        image_HWC: Image, uint8 RGB.
        output_format: File format.
        compression: OpenAI's `output_compression`, 0 to 100, for jpeg and webp. It overrides
            `quality`.
        quality: OpenAI's `quality`.
    """
    buffer = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(image_HWC))
    if output_format == "png":
        image.save(buffer, "PNG", compress_level=3)
    else:
        level = _QUALITY.get(quality or "", _BEST_QUALITY) if compression is None else compression
        image.save(buffer, output_format.upper(), quality=level)
    return buffer.getvalue()
