# SPDX-License-Identifier: Apache-2.0
"""Fixtures that write the three tiny Wan 2.2 checkpoints once."""

from pathlib import Path

import pytest
from helpers.wan22_driver import write_checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("wan2_2"))
