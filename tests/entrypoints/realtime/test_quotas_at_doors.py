# SPDX-License-Identifier: Apache-2.0
"""What a client of a realtime door is told when its key's quota is used up."""

import base64

from helpers.fake_engine import LATER, Client, DoorServer, infer
from helpers.live_clients import VideoClient, png

from vllm_omni.entrypoints.quotas import FileQuotas, Quota, QuotaFile

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
