# SPDX-License-Identifier: Apache-2.0
"""One socket that floods a real server: it is closed with its reason, and its neighbours hardly notice."""

import pytest
from floods import BINARY_BEGIN, EMPTY_FRAGMENT, FRAGMENT, PING, flood, neighbour
from served import Served

HELD_MS = 300.0
"""What a neighbour may wait at most, client and server on two cores that others use; 3.9 to 9.7 s before the budget."""


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(BINARY_BEGIN + FRAGMENT * 1_000_000, id="one-byte fragments"),
        pytest.param(BINARY_BEGIN + EMPTY_FRAGMENT * 1_000_000, id="empty fragments"),
        pytest.param(PING * 400_000, id="pings"),
    ],
)
def test_a_flood_of_small_frames_ends_its_own_socket_only(served: Served, data: bytes) -> None:
    """Closed with 1008 and the limit; `/health` and a neighbour's ping are answered meanwhile."""
    with served.client() as flooding, neighbour(served) as felt:
        closed = flood(flooding, data)
    print(felt)
    assert closed is not None
    assert closed[0] == 1008
    assert "400 frames under 1024 bytes" in closed[1]
    assert max(*felt.health_ms, *felt.ping_ms) < HELD_MS
