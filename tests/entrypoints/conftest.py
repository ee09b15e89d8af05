# SPDX-License-Identifier: Apache-2.0
"""The fixture that every endpoint test uses."""

from collections.abc import Iterator

import pytest
from helpers.fake_engine import EndpointServer


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    """Check at the end of a module that each of its servers has ended."""
    yield
    EndpointServer.wait_until_all_ended()
