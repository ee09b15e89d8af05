# SPDX-License-Identifier: Apache-2.0
"""Eager renderers for all tests of the tiny world; the ground of the village is baked once."""

import pytest

from training.tiny_world.render import Renderer


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """48x80: a twentieth of a second a frame."""
    return Renderer("cpu", 48, 80, compiled=False, frames_per_call=1)


@pytest.fixture(scope="session")
def small_renderer(renderer: Renderer) -> Renderer:
    """24x40: where only colours or shapes of tensors count."""
    small = Renderer("cpu", 24, 40, compiled=False, frames_per_call=1)
    small._ground = renderer._ground
    return small
