# SPDX-License-Identifier: Apache-2.0
"""Convert a client's image to VAE input.

`prepare_image` stretches the image to the output size, and `cut_image` crops and resizes it. The
conversion can also be done in two steps: `fit_image` or `stretch_image` resizes the image, then
`image_pixels` converts it.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn


def prepare_image(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return an image in the VAE's input format: [1, 3, 1, height, width], fp32, approximately in
    [-1, 1].

    The image is resized to the output size without regard to its aspect ratio. The original also
    stretches images, but it derives the output size from the image's aspect ratio. As in the
    original, the image is resized with bicubic interpolation without antialiasing, and values that
    overshoot are not clamped.

    Args:
        image: Image, uint8 [h, w, 3] or float [3, h, w] in [0, 1]. The result is on the same
            device.
        height: Height of the result in pixels.
        width: Width of the result in pixels.

    Raises:
        ValueError: The shape or dtype is wrong, or a value is not finite.
    """
    if image.dtype == torch.uint8:
        if image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"a uint8 image must be [height, width, 3], got {list(image.shape)}")
        unit_CHW = image.permute(2, 0, 1).float() / 255
    else:
        if image.ndim != 3 or image.shape[0] != 3 or not image.is_floating_point():
            raise ValueError(
                f"an image must be uint8 [h, w, 3] or float [3, h, w], got {image.dtype} "
                f"{list(image.shape)}"
            )
        unit_CHW = image.float()
        if not bool(((unit_CHW >= 0) & (unit_CHW <= 1)).all()):
            raise ValueError("a float image must have values from 0 to 1")
    source_height, source_width = unit_CHW.shape[1:]
    if min(source_height, source_width) < 1:
        raise ValueError(f"the image is empty: {source_height} x {source_width}")
    pixels_1CHW = nn.functional.interpolate(
        (unit_CHW * 2 - 1)[None], size=(height, width), mode="bicubic"
    )
    return pixels_1CHW[:, :, None].contiguous()


def cut_image(image_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Center-crop a uint8 image to the aspect ratio of `width` x `height` and resize it. The result
    has the same format as that of `prepare_image`.

    As in Matrix-Game's original code, Pillow resizes the image on the host, bilinearly and with
    antialiasing.
    """
    cut = Image.fromarray(image_HWC.cpu().numpy()).crop(middle_box(image_HWC, height, width))
    return pixels_of(resize_image(torch.from_numpy(np.array(cut)), height, width))


def resize_image(image_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize a uint8 image with Pillow on the host, bilinearly and with antialiasing. The aspect
    ratio is not preserved.
    """
    image = Image.fromarray(image_HWC.cpu().numpy())
    return torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BILINEAR)))


def pixels_of(image_HWC: torch.Tensor) -> torch.Tensor:
    """Return a uint8 image in the VAE's input format, [1, 3, 1, H, W] in [-1, 1], fp32."""
    return (image_HWC.permute(2, 0, 1)[None, :, None].float() / 255) * 2 - 1


def middle_box(image_HWC: torch.Tensor, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the largest center crop with the aspect ratio of `width` x `height`, as (left, top,
    right, bottom).
    """
    rows, columns = image_HWC.shape[:2]
    tall = rows / columns > height / width
    high, wide = (
        (int(columns * height / width), columns) if tall else (rows, int(rows * width / height))
    )
    left, top = (columns - wide) / 2, (rows - high) / 2
    return round(left), round(top), round(left + wide), round(top + high)


def fit_image(image_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize a start image so that it covers `width` x `height`, and center-crop it. The result is
    uint8.
    """
    whole = Image.fromarray(image_HWC.cpu().numpy())
    fitted = ImageOps.fit(whole, (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted))


def stretch_images(images_HWC: Sequence[torch.Tensor], side: int) -> list[torch.Tensor]:
    """Apply `stretch_image` to all reference images in parallel, in one thread per image."""
    with ThreadPoolExecutor(max(len(images_HWC), 1)) as threads:
        return list(threads.map(lambda image: stretch_image(image, side), images_HWC))


def stretch_image(image_HWC: torch.Tensor, side: int) -> torch.Tensor:
    """Resize a reference image to a square regardless of its aspect ratio. The result is uint8."""
    whole = Image.fromarray(image_HWC.cpu().numpy())
    return torch.from_numpy(np.array(whole.resize((side, side))))


def image_pixels(image_HWC: torch.Tensor) -> torch.Tensor:
    """Return a uint8 image in the VAE's input format, fp32 [1, 3, 1, H, W] in [-1, 1], on the
    image's device.
    """
    return (image_HWC.float() * (2 / 255) - 1).permute(2, 0, 1)[None, :, None].contiguous()
