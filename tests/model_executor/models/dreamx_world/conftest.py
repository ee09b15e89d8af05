# SPDX-License-Identifier: Apache-2.0
"""Fixtures that write tiny DreamX-World checkpoints once."""

from pathlib import Path

import pytest

from vllm_omni.model_executor.models.dreamx_world.checkpoint import LAYOUTS
from vllm_omni.testing.tiny.dreamx_world import make_tiny


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one checkpoint per layout to a folder named after the layout. Tests must not change
    these checkpoints.
    """
    found = {layout: tmp_path_factory.mktemp("dreamx") / layout for layout in LAYOUTS}
    for layout, folder in found.items():
        make_tiny(folder, 0, layout)
    return found
