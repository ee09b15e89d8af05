# SPDX-License-Identifier: Apache-2.0
"""A world's start images are recognised even after recompression or resizing, and other images are
not.
"""

import importlib.resources
import io
import math
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from training.tiny_world.export import VIEWS
from training.tiny_world.render import Renderer
from training.tiny_world.village import STYLES
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.entrypoints.realtime.connection.images import load_image
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.worlds.description import WorldDescription, description_file, read_description
from vllm_omni.worlds.recognition import StartImages

VILLAGE: Final = Path(str(importlib.resources.files("vllm_omni.worlds") / "village"))
SAMPLES: Final = Path(
    str(importlib.resources.files("vllm_omni.entrypoints.webui") / "static/samples")
)
SIZE: Final = (160, 96)


@pytest.fixture(scope="module")
def description() -> WorldDescription:
    card = read_description(VILLAGE)
    assert card is not None
    return card


@pytest.fixture(scope="module")
def images(description: WorldDescription) -> StartImages:
    return StartImages.load(VILLAGE, description)


def start_image(description: WorldDescription, index: int) -> Image.Image:
    with Image.open(description_file(VILLAGE, description.starts[index].file)) as image:
        return image.convert("RGB")


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy())


@pytest.mark.parametrize("scale", [0.5, 1, 2])
@pytest.mark.parametrize("quality", [None, 50])
@pytest.mark.parametrize("index", range(9))
def test_a_start_image_is_recognised(
    description: WorldDescription,
    images: StartImages,
    index: int,
    scale: float,
    quality: int | None,
) -> None:
    """A start image is recognised even as a low-quality JPEG, at half or double size, or stretched
    in the way that the endpoints stretch images.

    The three styles of the same image are distinguished.
    """
    image = start_image(description, index)
    image = image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
    )
    file = io.BytesIO()
    if quality is None:
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=quality)
    for width, height in (SIZE, (320, 192)):
        pixels = load_image(file.getvalue(), height, width, EndpointLimits())
        assert images.recognise(torch.from_numpy(pixels)) == description.starts[index]


def test_a_view_half_a_metre_away_is_another_image(images: StartImages) -> None:
    """A view from half a metre away, or after a turn of five degrees, is not recognised as the
    start image.

    The test uses the street at dusk because that image has the least contrast.
    """
    _, x, z, heading = next(view for view in VIEWS if view[0] == "street")
    moves = [(0.5, 0, 0), (-0.5, 0, 0), (0, 0.5, 0), (0, -0.5, 0), (0, 0, 5), (0, 0, -5)]
    positions = torch.tensor([(x + dx, z + dz) for dx, dz, _ in moves])
    yaw = torch.tensor([math.radians(heading + turn) for *_, turn in moves])
    style = torch.full((len(moves),), STYLES.index("dusk"))
    frames = Renderer(frames_per_call=1).render(positions, yaw, torch.zeros(len(moves)), style)
    assert [images.recognise(frame) for frame in frames] == [None] * len(moves)


def other_images(description: WorldDescription) -> list[torch.Tensor]:
    """Return 1,000 images that are not start images of the world."""
    rng = np.random.default_rng(3)
    others: list[torch.Tensor] = []
    for index in range(9):
        image = start_image(description, index)
        shifted = [
            image.transform(SIZE, Image.Transform.AFFINE, (1, 0, dx, 0, 1, 0)) for dx in (-12, 12)
        ]
        others += [
            as_tensor(each) for each in (ImageOps.mirror(image), ImageOps.flip(image), *shifted)
        ]
    tour, _ = decode_mp4((VILLAGE / "tour.mp4").read_bytes())
    others += [torch.from_numpy(frame) for frame in tour[12:]]  # frames after the start image
    for path in sorted(SAMPLES.glob("*.jpg")):
        with Image.open(path) as opened:
            sample = opened.convert("RGB")
        for _ in range(100):
            share = rng.uniform(0.3, 1)
            width, height = int(sample.width * share), int(sample.height * share)
            left, top = (
                rng.integers(0, sample.width - width + 1),
                rng.integers(0, sample.height - height + 1),
            )
            others.append(
                as_tensor(sample.crop((left, top, left + width, top + height)).resize(SIZE))
            )
    for _ in range(150):
        first, last = rng.integers(0, 256, (2, 3))
        down = np.linspace(first, last, SIZE[1])[:, None].repeat(SIZE[0], 1)
        others.append(torch.from_numpy(down.astype(np.uint8)))
        others.append(
            torch.from_numpy(np.broadcast_to(first, (SIZE[1], SIZE[0], 3)).astype(np.uint8))
        )
    while len(others) < 1000:
        coarse = rng.integers(0, 256, (rng.integers(1, 13), rng.integers(1, 21), 3), np.uint8)
        others.append(as_tensor(Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)))
    return others[:1000]


def test_no_other_image_is_recognised(description: WorldDescription, images: StartImages) -> None:
    """Mirrored and shifted start images, frames of a walk, photographs, gradients, uniform colours
    and noise are not recognised.
    """
    others = other_images(description)
    assert len(others) == 1000
    assert [
        number for number, other in enumerate(others) if images.recognise(other) is not None
    ] == []


def test_a_world_without_start_images_recognises_none(description: WorldDescription) -> None:
    bare = StartImages.load(VILLAGE, msgspec.structs.replace(description, starts=(), tour=None))
    assert bare.recognise(torch.zeros(96, 160, 3, dtype=torch.uint8)) is None


def test_a_start_image_that_cannot_be_read_is_named(
    description: WorldDescription, tmp_path: Path
) -> None:
    (tmp_path / "start").mkdir()
    for start in description.starts:
        (tmp_path / start.file).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"square_day\.png cannot be read as a start image"):
        StartImages.load(tmp_path, description)
