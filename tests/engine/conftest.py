# SPDX-License-Identifier: Apache-2.0
"""An engine on the null world that all tests with default options share.

The engine is shared because starting one takes most of a test's time.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.engine_client import SharedEngine, shared_engine


@pytest.fixture(scope="package")
def _null_engine(null_world: Path) -> Iterator[SharedEngine]:
    with shared_engine(null_world) as engine:
        yield engine


@pytest.fixture
def null_engine(_null_engine: SharedEngine) -> Iterator[SharedEngine]:
    """The shared engine on the null world, without any open session."""
    yield _null_engine
    _null_engine.clear()
