# SPDX-License-Identifier: Apache-2.0
"""Fixture that applies to every endpoint test."""

from collections.abc import Iterator

import pytest
from helpers.fake_engine import EndpointServer


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    """Check at the end of each test module that all of the module's servers have ended."""
    yield
    EndpointServer.wait_until_all_ended()
