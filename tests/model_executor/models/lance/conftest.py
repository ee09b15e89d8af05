# SPDX-License-Identifier: Apache-2.0
"""A tiny Lance checkpoint, written once."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of the video model. Tests must not change it."""
    return tiny_checkpoint("lance", "video")
