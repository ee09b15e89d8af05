# SPDX-License-Identifier: Apache-2.0
"""`StartImages`: recognises the world's own start images, whose poses are known.

An image is stretched to 40x24 and 20x12 pixels, just as a session stretches its start image to its
video size, and is compared with each start image. Two distances must be small: the root mean square
difference at 40x24, and the largest mean difference of a 2x2 block at 20x12, both divided by the
standard deviation of the start image. The limits were chosen based on the village's nine start
images. The images that must be accepted are start images after JPEG compression at quality 50,
resizing to half or double size, or one of four filters. The images that must be rejected are
renders from half a metre away or rotated by 5 degrees.

| distance | largest accepted | smallest rejected | limit |
|---|---|---|---|
| root mean square | 0.23 | 0.32 | 0.27 |
| largest block | 0.32 | 0.47 | 0.38 |

Pixel differences are summed exactly, as integers, so every rank computes the same result.
"""

# S start images, H height, W width

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image

from vllm_omni.worlds.description import StartImage, WorldDescription, description_file

_FINE: Final = (40, 24)
_COARSE: Final = (20, 12)
_LARGEST_RMS: Final = 0.27
_LARGEST_BLOCK: Final = 0.38


@dataclass(frozen=True, eq=False)
class StartImages:
    """The start images of a world."""

    starts: tuple[StartImage, ...]
    """Descriptions of the start images."""
    fine_SHW3: np.ndarray
    """Start images scaled down to 40x24, int64, in the order of `starts`."""
    coarse_SHW3: np.ndarray
    """Start images scaled down to 20x12, int64, in the order of `starts`."""

    @classmethod
    def load(cls, folder: Path, description: WorldDescription) -> "StartImages":
        """Read the start images of a world description.

        Raises:
            ValueError: An image cannot be read. The message is one line.
        """
        images = [_read(description_file(folder, start.file)) for start in description.starts]
        fine = [_scaled(image, _FINE) for image in images]
        coarse = [_scaled(image, _COARSE) for image in images]
        empty = np.empty((0, 1, 1, 3), np.int64)
        return cls(
            description.starts,
            np.stack(fine) if fine else empty,
            np.stack(coarse) if coarse else empty,
        )

    def recognise(self, image_HW3: torch.Tensor) -> StartImage | None:
        """Return the start image that matches an image, or None if no start image matches.

        The comparison takes less than a millisecond for an image of a session's size.

        Args:
            image_HW3: uint8 image of any size.
        """
        if not self.starts:
            return None
        image = Image.fromarray(np.ascontiguousarray(image_HW3.cpu().numpy()))
        rms_S = _distances(self.fine_SHW3, _scaled(image, _FINE), block=None)
        nearest = int(rms_S.argmin())
        if rms_S[nearest] > _LARGEST_RMS:
            return None
        block_S = _distances(
            self.coarse_SHW3[nearest : nearest + 1], _scaled(image, _COARSE), block=2
        )
        return self.starts[nearest] if block_S[0] <= _LARGEST_BLOCK else None


def _read(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a start image: {error}") from error


def _scaled(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(image.resize(size, Image.Resampling.BOX)).astype(np.int64)


def _distances(known_SHW3: np.ndarray, image_HW3: np.ndarray, block: int | None) -> np.ndarray:
    """Return the distance to each start image, fp64 [S].

    Args:
        known_SHW3: Start images, scaled down.
        image_HW3: Image to compare, scaled down to the same size.
        block: Side length of the blocks whose largest mean difference is the distance, or None for
            the root mean square difference.
    """
    difference_SHW3 = known_SHW3 - image_HW3
    # The standard deviation of a uniform start image is 0, so 1 is added.
    spread_S = known_SHW3.reshape(len(known_SHW3), -1).std(axis=1) + 1.0
    if block is None:
        total_S = (difference_SHW3**2).reshape(len(known_SHW3), -1).sum(axis=1)
        return np.sqrt(total_S / image_HW3.size) / spread_S
    count, height, width, _ = difference_SHW3.shape
    blocks = np.abs(difference_SHW3).reshape(
        count, height // block, block, width // block, block, 3
    )
    return (
        blocks.sum(axis=(2, 4, 5)).reshape(count, -1).max(axis=1) / (3 * block * block) / spread_S
    )
