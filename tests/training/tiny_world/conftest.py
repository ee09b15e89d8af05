# SPDX-License-Identifier: Apache-2.0
"""Fixtures for eager renderers that all tiny world tests share. The village's ground texture is
computed only once.
"""

import pytest
import torch

from training.tiny_world.casting import cast
from training.tiny_world.render import Renderer


class RememberingRenderer(Renderer):
    """An eager renderer that caches its results.

    Each view is rendered only once, however many worlds and ground truths use it. Its rays are cast
    once for all styles.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__("cpu", height, width, compiled=False, frames_per_call=1)
        self._seen: dict[tuple[bytes, ...], torch.Tensor] = {}
        self._hits: dict[tuple[bytes, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._cast = self._remembered_cast

    def _remembered_cast(
        self, rays_BR3: torch.Tensor, *bodies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = tuple(value.numpy().tobytes() for value in (rays_BR3, *bodies))
        if key not in self._hits:
            self._hits[key] = cast(rays_BR3, *bodies)
        return self._hits[key]

    def _frames(self, *view: torch.Tensor) -> torch.Tensor:
        key = tuple(value.numpy().tobytes() for value in view)
        if key not in self._seen:
            self._seen[key] = super()._frames(*view)
        return self._seen[key]


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """Return a renderer for frames of 48x80 pixels. Each frame takes a twentieth of a second."""
    return RememberingRenderer(48, 80)


@pytest.fixture(scope="session")
def small_renderer(renderer: Renderer) -> Renderer:
    """Return a renderer for frames of 24x40 pixels, for tests that check only colours or tensor
    shapes.
    """
    small = RememberingRenderer(24, 40)
    small._ground = renderer._ground
    return small
