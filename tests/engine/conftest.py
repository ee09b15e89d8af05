# SPDX-License-Identifier: Apache-2.0
"""A null-world engine shared by all tests that need only default options, and a language model for
the tests on CUDA.

The engine is shared because starting an engine takes most of a test's time.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ar_cuda import Reference, write_model
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


@pytest.fixture(scope="package")
def cuda_language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cuda_language_model"))


@pytest.fixture(scope="package")
def reference(cuda_language_model: Path) -> Reference:
    return Reference(cuda_language_model)
