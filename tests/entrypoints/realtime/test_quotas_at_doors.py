# SPDX-License-Identifier: Apache-2.0
"""What a client of a realtime door is told when its key's quota is used up."""

import base64
from collections.abc import Callable

from helpers.fake_engine import FIRST, LATER, Client, DoorServer, infer
from helpers.live_clients import VideoClient, png
from helpers.waits import wait_until

from vllm_omni.entrypoints.quotas import Allowance, FileQuotas, Quota, QuotaFile, Quotas

START = {
    "type": "session.start",
    "prompt": "a path",
    "width": 48,
    "height": 32,
    "image_reference": {"image_url": "data:image/png;base64," + base64.b64encode(png()).decode()},
}


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def quotas(clock: Clock, **limits: int) -> FileQuotas:
    """Quotas that hold for every client."""
    return FileQuotas(QuotaFile(default=Quota(**limits)), clock)


def test_one_session_too_many_is_refused_and_says_when_to_try_again(door: DoorServer) -> None:
    door.manager.quotas = quotas(Clock(), sessions=1)
    with door.client() as client:
        client.send(infer(session_id="one"))
        client.frames()
        error = client.ask(infer(session_id="two"))
        assert (error["code"], error["quota"], error["retryable"]) == ("quota_exceeded", "sessions", True)
        assert error["retry_after_ms"] > 0
        client.ask({"endpoint": "close", "session_id": "one", "protocol_version": 1})
        client.send(infer(session_id="two"))
        client.frames()


def test_a_request_beyond_the_chunks_of_a_minute_changes_nothing(client: Client, door: DoorServer) -> None:
    """A request that is begun is finished, and paid by waiting; one that is refused leaves the world, even if it asked
    for a new one."""
    clock = Clock()
    door.manager.quotas = quotas(clock, chunks_per_minute=2)
    client.send(infer())
    client.frames()
    client.send(infer(2 * LATER))
    assert client.frames()[-1]["chunk_index"] == 2
    error = client.ask(infer(restart=True))
    assert (error["code"], error["quota"], error["retry_after_ms"]) == ("quota_exceeded", "chunks", 60_000)
    assert len(door.engine.chunks) == 3
    clock.now_s += 60
    client.send(infer(LATER))
    assert client.frames()[-1]["chunk_index"] == 3


def test_a_stream_that_has_used_its_chunks_delivers_them_and_ends_with_the_reason(door: DoorServer) -> None:
    """At the doors of endless streams, where chunks are asked for one by one."""
    door.manager.quotas = quotas(Clock(), chunks_per_minute=3)
    with VideoClient(door.port) as video:
        assert video.ask(START)["type"] == "video.start"
        messages = [video.receive()]
        while messages[-1]["type"] != "error":
            messages.append(video.receive())
    assert sum(message["type"] == "video.chunk_metadata" for message in messages) == 3
    assert messages[-1]["code"] == "quota_exceeded" and messages[-1]["retry_after_ms"] > 0
    assert len(door.engine.chunks) == 3


def test_a_live_stream_pays_for_its_bytes_and_ends_with_the_reason(door: DoorServer) -> None:
    """Chunks are delivered until the bytes of a minute are used; the one that used them up is delivered, too."""
    door.manager.quotas = quotas(Clock(), bytes_per_minute=1)
    with VideoClient(door.port) as video:
        assert video.ask(START)["type"] == "video.start"
        messages = [video.receive()]
        while messages[-1]["type"] != "error":
            messages.append(video.receive())
    (error,) = [message for message in messages if message["type"] == "error"]
    assert error["code"] == "quota_exceeded" and "bytes a minute" in error["message"]
    assert 1 <= len(door.engine.chunks) <= 2


class Charges(Quotas, Allowance):
    """Counts what clients are charged and refuses nothing."""

    def __init__(self) -> None:
        self.chunks = 0

    def of(self, client: str) -> Allowance:
        return self

    def charge_chunks(self, count: int) -> None:
        self.chunks += count


def test_a_client_that_reconnects_pays_once_for_a_chunk(make_door: Callable[..., DoorServer]) -> None:
    """The same request on another connection: chunks that are kept are free, the others are paid for when it begins."""
    door = make_door()
    door.engine.delay_s = 0.05
    door.manager.quotas = charges = Charges()
    request = infer(FIRST + 3 * LATER, request_id="r1", session_id="a")
    with door.client() as client:
        client.send(request)
        client.receive()
    wait_until(lambda: not door.engine.running)
    kept = door.manager.sessions()[0].next_chunk
    assert 1 <= kept < 4 and charges.chunks == 4
    with door.client() as client:
        client.send(request)
        client.frames()
    assert charges.chunks == 4 + (4 - kept)
