# SPDX-License-Identifier: Apache-2.0
"""A fixture that writes a tiny Lance checkpoint once."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Return a checkpoint of the video model. Tests must not change this checkpoint."""
    return tiny_checkpoint("lance", "video")
