# SPDX-License-Identifier: Apache-2.0
"""Errors at the realtime endpoints after a key has used up its quota."""

import base64
from collections.abc import Callable

import pytest
from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, infer
from helpers.live_clients import VideoClient, png
from helpers.waits import wait_until

from vllm_omni.entrypoints.limits.quotas import Allowance, FileQuotas, Quota, QuotaFile, Quotas

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
    """Return quotas that apply to every client."""
    return FileQuotas(QuotaFile(default=Quota(**limits)), clock)


def test_a_session_beyond_the_quota_is_refused_with_a_retry_time(
    endpoint: EndpointServer,
) -> None:
    endpoint.manager.quotas = quotas(Clock(), sessions=1)
    with endpoint.client() as client:
        client.send(infer(session_id="one"))
        client.frames()
        error = client.request(infer(session_id="two"))
        assert (error["code"], error["quota"], error["retryable"]) == (
            "quota_exceeded",
            "sessions",
            True,
        )
        assert error["retry_after_ms"] > 0
        client.request({"endpoint": "close", "session_id": "one", "protocol_version": 1})
        client.send(infer(session_id="two"))
        client.frames()


def test_a_request_refused_by_the_chunk_quota_changes_nothing(
    client: Client, endpoint: EndpointServer
) -> None:
    """A request that has started is finished even if it exceeds the quota, and the excess delays
    the next request. A refused request leaves the session unchanged, even with `restart`.
    """
    clock = Clock()
    endpoint.manager.quotas = quotas(clock, chunks_per_minute=2)
    client.send(infer())
    client.frames()
    client.send(infer(2 * LATER))
    assert client.frames()[-1]["chunk_index"] == 2
    error = client.request(infer(restart=True))
    assert (error["code"], error["quota"], error["retry_after_ms"]) == (
        "quota_exceeded",
        "chunks",
        60_000,
    )
    assert len(endpoint.engine.chunks) == 3
    clock.now_s += 60
    client.send(infer(LATER))
    assert client.frames()[-1]["chunk_index"] == 3


@pytest.mark.parametrize(
    ("limits", "delivered"), [({"chunks_per_minute": 3}, (3,)), ({"bytes_per_minute": 1}, (1, 2))]
)
def test_a_stream_delivers_its_quota_and_ends_with_the_reason(
    endpoint: EndpointServer, limits: dict[str, int], delivered: tuple[int, ...]
) -> None:
    """An endless stream is charged per chunk. The chunk that exhausts the byte quota is still
    delivered, and the stream then ends with the reason.
    """
    endpoint.manager.quotas = quotas(Clock(), **limits)
    with VideoClient(endpoint.port) as video:
        assert video.request(START)["type"] == "video.start"
        messages = [video.receive()]
        while messages[-1]["type"] != "error":
            messages.append(video.receive())
    assert messages[-1]["code"] == "quota_exceeded" and messages[-1]["retry_after_ms"] > 0
    assert len(messages) - 1 == len(endpoint.engine.chunks) in delivered


class Charges(Quotas, Allowance):
    """A quota that counts charged chunks and never refuses a request."""

    def __init__(self) -> None:
        self.chunks = 0

    def allowance_of(self, client: str) -> Allowance:
        return self

    def charge_chunks(self, count: int) -> None:
        self.chunks += count


def test_a_client_that_reconnects_pays_once_for_a_chunk(
    make_endpoint: Callable[..., EndpointServer],
) -> None:
    """When a client continues a request on another connection, it is charged only for chunks that
    have not been generated yet.
    """
    endpoint = make_endpoint()
    endpoint.engine.delay_s = 0.05
    endpoint.manager.quotas = charges = Charges()
    request = infer(FIRST + 3 * LATER, request_id="r1", session_id="a")
    with endpoint.client() as client:
        client.send(request)
        client.receive()
    wait_until(lambda: not endpoint.engine.running)
    retained = endpoint.manager.sessions()[0].next_chunk
    assert 1 <= retained < 4 and charges.chunks == 4
    with endpoint.client() as client:
        client.send(request)
        client.frames()
    assert charges.chunks == 4 + (4 - retained)
