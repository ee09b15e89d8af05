# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tiny checkpoints of model variants that only the worker tests use."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def lingbot_pretrain(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("lingbot_world", "v2_pretrain")


@pytest.fixture(scope="session")
def lingbot_poses(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("lingbot_world", "world")


@pytest.fixture(scope="session")
def matrix_game(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("matrix_game")


@pytest.fixture(scope="session")
def abot_world(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("abot_world")


@pytest.fixture(scope="session")
def dreamx_world(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("dreamx_world")


@pytest.fixture(scope="session")
def waypoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("waypoint", "v1_5")
