# SPDX-License-Identifier: Apache-2.0
"""`Connection.send`: messages that belong together stay together, and a peer that does not read
is given up.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_time import run_in_virtual_time

from vllm_omni.entrypoints.errors import ClientDisconnected
from vllm_omni.entrypoints.realtime.connection.connection import Connection
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits


class Peer:
    """A WebSocket that takes a message when it has room for it, as uvicorn's does."""

    def __init__(self, seconds_a_message: float) -> None:
        self._seconds = seconds_a_message
        self.taken: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.scope: dict[str, Any] = {}
        self.client = None
        self.app = SimpleNamespace(state=SimpleNamespace())

    async def send_bytes(self, message: bytes) -> None:
        await asyncio.sleep(self._seconds)
        self.taken.append(message)


def connect(seconds_a_message: float) -> tuple[Peer, Connection]:
    peer: Any = Peer(seconds_a_message)
    return peer, Connection(peer, EndpointLimits(send_deadline_s=3.0))


@pytest.mark.parametrize(
    ("cancelled_after_s", "taken"),
    [(0.1, [b"other"]), (0.7, [b"1", b"2", b"3", b"other"])],
    ids=["none", "all"],
)
def test_a_cancelled_group_is_sent_whole_or_not_at_all(
    cancelled_after_s: float, taken: list[bytes]
) -> None:
    """A peer takes what follows a header for its payload, so another message may not come
    between.
    """

    async def scenario() -> None:
        peer, connection = connect(0.5)
        group = asyncio.ensure_future(connection.send(b"1", b"2", b"3"))
        await asyncio.sleep(cancelled_after_s)
        other = asyncio.ensure_future(connection.send(b"other"))
        group.cancel()
        await other
        assert group.cancelled()
        assert peer.taken == taken

    run_in_virtual_time(scenario())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_peer_that_does_not_read_is_given_up_at_the_deadline(is_cancelled: bool) -> None:
    """Also when the sender is cancelled meanwhile; the next send finds the connection closed."""

    async def scenario() -> None:
        peer, connection = connect(2.0)
        group = asyncio.ensure_future(connection.send(b"1", b"2", b"3"))
        if is_cancelled:
            await asyncio.sleep(2.5)
            group.cancel()
        await asyncio.wait([group])
        assert asyncio.get_running_loop().time() == 3.0
        assert (
            group.cancelled() if is_cancelled else isinstance(group.exception(), ClientDisconnected)
        )
        with pytest.raises(ClientDisconnected):
            await connection.send(b"other")
        assert peer.taken == [b"1"]

    run_in_virtual_time(scenario())
