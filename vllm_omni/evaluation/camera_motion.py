# SPDX-License-Identifier: Apache-2.0
"""Estimates from a video how far its camera turned between frames, and whether the camera moved
forward.

The functions search for the motion that gives the best correlation between frames. The correlation
does not depend on brightness or contrast. Frames are [N, H, W, 3], uint8 or float. Focal lengths
are relative to the image width.
"""

import itertools
import math

import torch
from torch.nn import functional

LARGEST_TURN = 15.0
"""Largest turn in degrees, to the left or right, that the search considers."""
_COARSE, _FINE = 0.5, 0.05


def turns(frames_NHW3: torch.Tensor, focal: float) -> torch.Tensor:
    """Return the angles in degrees by which the camera turned right between consecutive frames.
    Shape: [N - 1].

    If a camera turns without moving, the mapping from one image to the next does not depend on
    depth. Each result is the angle at which the warped frame correlates best with the next frame
    where the two overlap. The search runs first at half the resolution and then at the full
    resolution.
    """
    images = channels_first(frames_NHW3)
    half = functional.avg_pool2d(images, 2)
    grid = torch.arange(-LARGEST_TURN, LARGEST_TURN + _COARSE / 2, _COARSE)
    fine = torch.arange(-_COARSE, _COARSE + _FINE / 2, _FINE)
    found = []
    for index in range(len(images) - 1):
        coarse = grid[_turned_correlation(half[index], half[index + 1], grid, focal).argmax()]
        near = coarse + fine
        alike = _turned_correlation(images[index], images[index + 1], near, focal)
        found.append(peak(near, alike))
    return torch.tensor(found)


def growths(frames_NHW3: torch.Tensor) -> torch.Tensor:
    """Return the factors by which the image centre is enlarged between consecutive frames. Shape:
    [N - 1]. Each factor is the enlargement at which a frame correlates best with the next frame.
    """
    images = channels_first(frames_NHW3)
    factors = torch.arange(0.9, 1.3 + 0.005, 0.01)
    height, width = images.shape[2:]
    y = (torch.arange(height) + 0.5) * 2 / height - 1
    x = (torch.arange(width) + 0.5) * 2 / width - 1
    plane = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], dim=-1)
    grid = plane / factors[:, None, None, None]
    seen = (plane.abs() <= 0.9).all(dim=-1).float()  # inside the image for every factor
    found = []
    for before, after in itertools.pairwise(images):
        grown = functional.grid_sample(
            before.expand(len(factors), *before.shape), grid, mode="bilinear", align_corners=False
        )
        found.append(peak(factors, _correlation(grown, after.expand_as(grown), seen)))
    return torch.tensor(found)


def pixels_at_centre(degrees: torch.Tensor, width: int, focal: float) -> torch.Tensor:
    """Return the number of pixels by which the centre of an image `width` pixels wide moves when
    the camera turns by a given angle.
    """
    return focal * width * torch.tan(torch.deg2rad(degrees))


def channels_first(frames_NHW3: torch.Tensor) -> torch.Tensor:
    return frames_NHW3.float().permute(0, 3, 1, 2).cpu()


def _turned_correlation(
    before_3HW: torch.Tensor, after_3HW: torch.Tensor, degrees_K: torch.Tensor, focal: float
) -> torch.Tensor:
    """Return the correlation of `after` with `before` turned right by each of K angles. Shape:
    [K].
    """
    height, width = before_3HW.shape[1:]
    focal = focal * width
    x = (torch.arange(width) + 0.5 - width / 2) / focal
    y = (torch.arange(height) + 0.5 - height / 2) / focal
    angle = torch.deg2rad(degrees_K)[:, None]
    ahead = angle.cos() - angle.sin() * x
    u = (angle.cos() * x + angle.sin()) / ahead * focal * 2 / width
    v = y[None, :, None] / ahead[:, None, :] * focal * 2 / height
    grid = torch.stack((u[:, None, :].expand_as(v), v), dim=-1)
    turned = functional.grid_sample(
        before_3HW.expand(len(degrees_K), *before_3HW.shape),
        grid,
        mode="bilinear",
        align_corners=False,
    )
    edge = torch.tensor([1 - 1 / width, 1 - 1 / height])
    seen = ((grid.abs() <= edge).all(dim=-1) & (ahead > 0)[:, None, :]).unsqueeze(1).float()
    return _correlation(turned, after_3HW.expand_as(turned), seen)


def _correlation(
    images_K3HW: torch.Tensor, others_K3HW: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Return each image pair's correlation over the pixels marked in `seen`. Shape: [K]."""
    count = seen.sum(dim=(-2, -1), keepdim=True).clamp(min=1)

    def centred(images: torch.Tensor) -> torch.Tensor:
        retained = images * seen
        return (retained - retained.sum(dim=(2, 3), keepdim=True) / count) * seen

    a, b = centred(images_K3HW), centred(others_K3HW)
    power = (a.square().sum(dim=(1, 2, 3)) * b.square().sum(dim=(1, 2, 3))).sqrt()
    return (a * b).sum(dim=(1, 2, 3)) / power.clamp(min=1e-6)


def peak(positions_K: torch.Tensor, values_K: torch.Tensor) -> float:
    """Return the position of the maximum, refined with a parabola through the adjacent values."""
    best = int(values_K.argmax())
    if best in (0, len(values_K) - 1):
        return float(positions_K[best])
    left, middle, right = (float(value) for value in values_K[best - 1 : best + 2].double())
    bend = left - 2 * middle + right
    shift = 0.0 if math.isclose(bend, 0.0, abs_tol=1e-12) else 0.5 * (left - right) / bend
    return float(positions_K[best]) + shift * float(positions_K[best] - positions_K[best - 1])
