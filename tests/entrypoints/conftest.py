# SPDX-License-Identifier: Apache-2.0
"""What every test of a door has."""

from collections.abc import Iterator

import pytest
from helpers.fake_engine import EndpointServer


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    """Each server that a module's tests left ends by itself."""
    yield
    EndpointServer.wait_until_all_ended()
