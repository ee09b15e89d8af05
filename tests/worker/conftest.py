# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of variants that only tests of the worker use."""

from pathlib import Path

import pytest

from vllm_omni.model_executor.models.registry import get_family


def _written(paths: pytest.TempPathFactory, family: str, variant: str) -> Path:
    folder = paths.mktemp(family)
    get_family(family).make_tiny(folder, 0, variant)
    return folder


@pytest.fixture(scope="session")
def lingbot_pretrain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, "lingbot_world", "v2_pretrain")


@pytest.fixture(scope="session")
def lingbot_poses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, "lingbot_world", "world")


@pytest.fixture(scope="session")
def matrix_game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, "matrix_game", "original")


@pytest.fixture(scope="session")
def abot_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, "abot_world", "original")


@pytest.fixture(scope="session")
def dreamx_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, "dreamx_world", "original")


@pytest.fixture(scope="session")
def waypoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, "waypoint", "v1_5")
