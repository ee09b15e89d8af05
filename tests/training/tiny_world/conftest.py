# SPDX-License-Identifier: Apache-2.0
"""Eager renderers for all tests of the tiny world; the ground of the village is baked once."""

import pytest
import torch

from training.tiny_world.render import Renderer


class RememberingRenderer(Renderer):
    """Eager; each view is rendered once, however many worlds, truths and styles are compared by it."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__("cpu", height, width, compiled=False, frames_per_call=1)
        self._seen: dict[tuple[bytes, ...], torch.Tensor] = {}

    def _frames(self, *view: torch.Tensor) -> torch.Tensor:
        key = tuple(value.numpy().tobytes() for value in view)
        if key not in self._seen:
            self._seen[key] = super()._frames(*view)
        return self._seen[key]


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """48x80: a twentieth of a second a frame."""
    return RememberingRenderer(48, 80)


@pytest.fixture(scope="session")
def small_renderer(renderer: Renderer) -> Renderer:
    """24x40: where only colours or shapes of tensors count."""
    small = RememberingRenderer(24, 40)
    small._ground = renderer._ground
    return small
