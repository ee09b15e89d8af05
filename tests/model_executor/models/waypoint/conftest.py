# SPDX-License-Identifier: Apache-2.0
"""Fixtures that write tiny Waypoint checkpoints once."""

from pathlib import Path

import pytest

from vllm_omni.model_executor.models.waypoint.checkpoint import LAYOUTS
from vllm_omni.testing.tiny.waypoint import make_tiny


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one checkpoint per layout. Tests must not change these checkpoints."""
    found = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    for layout, folder in found.items():
        make_tiny(folder, 0, layout)
    return found
