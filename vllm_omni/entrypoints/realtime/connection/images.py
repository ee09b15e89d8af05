# SPDX-License-Identifier: Apache-2.0
"""Convert images from clients, sent as bytes or arrays, to uint8 RGB arrays.

The format and size of an image are read from the file header before any pixels are decoded.
Pillow's error messages are never sent to clients.
"""

import base64
import binascii
import io
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from PIL import Image

from vllm_omni.actions import image_tensor
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.multimodal import rgb_image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow's names for the formats that clients may send."""
_ALLOWED: Final = (
    "send PNG, JPEG, WebP or GIF bytes, a data: URL of one, or a uint8 array [H, W, 3]"
)


def load_image(source: Any, height: int, width: int, limits: EndpointLimits) -> np.ndarray:
    """Return an image as a new uint8 RGB array `[height, width, 3]`.

    Loading an image takes about 10 ms, so call this function on a worker thread. The image is
    stretched (bicubic) to the requested size rather than cropped, because intrinsics are scaled by
    width and height.

    Args:
        source: File as bytes, `data:image/...;base64,` text, or a uint8 array `[H, W, 3 or 4]`.
            Transparent areas become white. If the file is an animation, its first frame is used.
        height: Result height in pixels.
        width: Result width in pixels.
        limits: Limits on image size.

    Raises:
        EndpointError: `invalid_image` if the image cannot be decoded, or `image_too_large` if it
            exceeds a limit.
    """
    image = read_image(source, limits)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image).copy()


def load_named_images(sources: Mapping[str, Any], limits: EndpointLimits) -> dict[str, np.ndarray]:
    """Return named images at their original sizes, as uint8 RGB arrays `[H, W, 3]` for a request's
    input tensors.

    Loading takes about 10 ms per image, so call this function on a worker thread.

    Args:
        sources: Images by name, each in a form that `load_image` accepts.
        limits: Limits on each image's size and on the total number of bytes.

    Raises:
        EndpointError: `invalid_image` if an image cannot be decoded, or `image_too_large` if a
            limit is exceeded. The error's `param` names the image.
    """
    _check_bytes(sum(len(x) for x in sources.values() if isinstance(x, bytes | str)), limits)
    loaded = {}
    for name, source in sources.items():
        try:
            loaded[image_tensor(name)] = np.asarray(read_image(source, limits)).copy()
        except EndpointError as error:
            error.param = f"images.{name}"
            raise
    return loaded


def read_image(source: Any, limits: EndpointLimits) -> Image.Image:
    """Return the image at its original size. Arguments and errors are the same as for
    `load_image`.
    """
    if isinstance(source, str):
        source = _data_url(source, limits)
    return (
        _from_array(source, limits)
        if isinstance(source, np.ndarray)
        else _from_file(source, limits)
    )


def _from_array(array: np.ndarray, limits: EndpointLimits) -> Image.Image:
    if (
        array.dtype != np.uint8
        or array.ndim != 3
        or array.shape[2] not in (3, 4)
        or 0 in array.shape
    ):
        raise EndpointError(
            "invalid_image",
            f"image array must be uint8 [H, W, 3], got {array.dtype} {list(array.shape)}",
            param="image",
        )
    _check_pixels(array.shape[1], array.shape[0], limits)
    return rgb_image(Image.fromarray(np.ascontiguousarray(array)))


def _from_file(data: Any, limits: EndpointLimits) -> Image.Image:
    if not isinstance(data, bytes) or not data:
        raise EndpointError("invalid_image", _ALLOWED, param="image")
    _check_bytes(len(data), limits)
    try:
        with warnings.catch_warnings():
            # This package's own limit is lower, and exceeding it is an error.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_pixels(image.width, image.height, limits)
                return rgb_image(image)
    except EndpointError:
        raise
    except Image.DecompressionBombError:  # Pillow checks its own limit first
        raise EndpointError(
            "image_too_large", "the image has far too many pixels", param="image"
        ) from None
    # Pillow's parsers raise a dozen exception types, with messages that contain addresses and file
    # names.
    except Exception:
        name = format_name(data)
        reason = (
            "the image cannot be read"
            if name in (None, *_SUPPORTED)
            else f"{name} is not supported"
        )
        raise EndpointError("invalid_image", f"{reason}; {_ALLOWED}", param="image") from None


_SUPPORTED: Final = ("PNG", "JPEG", "WebP", "GIF")
_SIGNATURES: Final = (
    (0, b"\x89PNG", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"GIF8", "GIF"),
    (8, b"WEBP", "WebP"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    *(
        (4, b"ftyp" + brand, "HEIC")
        for brand in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
    ),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"\0\0\x01\0", "ICO"),
    (0, b"\0\0\0\x0cjP", "JPEG 2000"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"8BPS", "PSD"),
    (0, b"%PDF", "PDF"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "XML or SVG"),
)


def format_name(data: bytes) -> str | None:
    """Return the name of the image format that a file's first bytes indicate, or None if the format
    is unknown.
    """
    return next(
        (name for at, magic, name in _SIGNATURES if data[at : at + len(magic)] == magic), None
    )


def _data_url(text: str, limits: EndpointLimits) -> bytes:
    head, _, body = text.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise EndpointError("invalid_image", _ALLOWED, param="image")
    _check_bytes(len(body) * 3 // 4, limits)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise EndpointError(
            "invalid_image", "the data: URL is not valid base64", param="image"
        ) from None


def _check_bytes(size: int, limits: EndpointLimits) -> None:
    if size > limits.max_image_bytes:
        raise EndpointError(
            "image_too_large",
            f"the image has {size} bytes; at most {limits.max_image_bytes} are allowed",
            param="image",
        )


def _check_pixels(width: int, height: int, limits: EndpointLimits) -> None:
    if width * height > limits.max_image_pixels:
        raise EndpointError(
            "image_too_large",
            f"the image has {width}x{height} pixels; at most {limits.max_image_pixels} are allowed",
            param="image",
        )
