# SPDX-License-Identifier: Apache-2.0
"""A null-world engine shared by all tests that need only default options.

The engine is shared because starting an engine takes most of a test's time.
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
    """The shared null-world engine. Sessions that a test leaves open are closed after the test."""
    yield _null_engine
    _null_engine.clear()
