# SPDX-License-Identifier: Apache-2.0
"""Parts of a connection: playing times, delivery to slow readers, and grouped sends."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_time import run_in_virtual_time

from vllm_omni.entrypoints.errors import ClientDisconnected, EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.connection.connection import Connection
from vllm_omni.entrypoints.realtime.connection.delivery_window import DeliveryWindow
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.play_clock import PlayClock


def test_playing_times_add_up() -> None:
    """The playing times of nine and then twelve frames at 12 frames per second add up, however
    early the chunks are requested.
    """
    clock = PlayClock()
    assert clock.schedule_chunk(9, 12, now_s=100.0) == pytest.approx((0.75, 0.75))
    assert clock.schedule_chunk(12, 12, now_s=100.2) == pytest.approx((1.55, 1.0))
    assert clock.schedule_chunk(12, 12, now_s=100.2) == pytest.approx((2.55, 1.0))


@pytest.mark.parametrize("now_s", [101.5, 900.0])
def test_a_late_or_paused_stream_starts_a_new_schedule(now_s: float) -> None:
    """Delays do not accumulate: after a delay or a pause, the next chunk has its full playing
    time.
    """
    clock = PlayClock()
    clock.schedule_chunk(12, 12, now_s=100.0)
    assert clock.schedule_chunk(12, 12, now_s=now_s) == pytest.approx((1.0, 1.0))


TIMEOUT_S, FPS = 0.4, 200.0
CHUNK = 4  # frames, which are 20 ms of video


def seconds_until_refused(
    take_s: Callable[[float], float],
    for_s: float,
    is_more_waiting: Callable[[int], bool] = lambda number: True,
    fps: float = FPS,
) -> float | None:
    """Deliver chunks to a client that needs `take_s(now)` seconds for each of them. Return the time
    at which the client is refused as too slow, or None if this does not happen within `for_s`.

    Args:
        is_more_waiting: Whether the chunk after the one with this number was ready.
    """

    async def scenario() -> float | None:
        window = DeliveryWindow(TIMEOUT_S, fps)
        clock = asyncio.get_running_loop().time
        started_s = clock()
        number = 0
        while (now_s := clock() - started_s) < for_s:
            number += 1
            try:
                await window.deliver(
                    asyncio.sleep(take_s(now_s)), CHUNK, partial(is_more_waiting, number)
                )
            except EndpointError:
                return clock() - started_s
        return None

    return run_in_virtual_time(scenario())


def test_a_quarter_of_the_rate_is_refused_after_the_timeout() -> None:
    """A client that reads at a quarter of the playing rate is refused after the timeout, even if
    the timeout expires in the middle of a message.
    """
    assert seconds_until_refused(lambda now_s: 0.08, 2.0) == pytest.approx(TIMEOUT_S, abs=0.06)
    assert seconds_until_refused(lambda now_s: 0.08 if now_s < 0.3 else 9.0, 2.0) == pytest.approx(
        TIMEOUT_S, abs=0.06
    )


@pytest.mark.parametrize("take_s", [0.001, 0.004, 0.015])
def test_a_client_that_reads_at_the_playing_rate_is_not_behind(take_s: float) -> None:
    """A client that reads at the playing rate is not behind, even if a model that is faster than
    real time keeps every queue full.
    """
    assert seconds_until_refused(lambda now_s: take_s, 3 * TIMEOUT_S) is None


@pytest.mark.parametrize(
    "chunk_s", [TIMEOUT_S * share for share in (0.1, 1.5 / 7, 4 / 7, 0.99, 1.5, 4.0)]
)
def test_a_chunk_may_be_longer_than_the_timeout(chunk_s: float) -> None:
    """A client that reads at the playing rate is never refused, whether a chunk lasts a fraction or
    a multiple of the timeout. A client that reads at less than half of the playing rate is refused.
    """
    fps = CHUNK / chunk_s
    assert (
        seconds_until_refused(lambda now_s: chunk_s, 12 * TIMEOUT_S + 6 * chunk_s, fps=fps) is None
    )
    refused_s = seconds_until_refused(
        lambda now_s: 2.5 * chunk_s, 12 * (TIMEOUT_S + chunk_s), fps=fps
    )
    assert refused_s is not None
    assert refused_s < 3.5 * (TIMEOUT_S + chunk_s)


def test_slowness_counts_from_when_it_starts() -> None:
    """Fast reads before a client becomes slow do not delay its timeout."""
    slow_from_s = 0.6
    refused_s = seconds_until_refused(lambda now_s: 0.002 if now_s < slow_from_s else 0.1, 3.0)
    assert refused_s is not None
    assert slow_from_s < refused_s < slow_from_s + TIMEOUT_S + 0.1


def test_a_client_that_catches_up_is_not_refused() -> None:
    """A client that repeatedly falls behind, but never for the whole timeout, is not refused."""
    assert (
        seconds_until_refused(lambda now_s: 0.03, 4 * TIMEOUT_S, lambda number: number % 10 < 7)
        is None
    )


def test_a_reader_in_bursts_is_refused_too() -> None:
    """A client that reads in bursts, each of which briefly empties the queue, is still behind and
    is refused.
    """
    refused_s = seconds_until_refused(lambda now_s: 0.03, 3.0, lambda number: number % 3 > 0)
    assert refused_s == pytest.approx(TIMEOUT_S, abs=0.15)


def test_a_slow_model_does_not_make_a_slow_reader() -> None:
    """A slow client is not behind as long as no chunk is waiting for it."""
    assert seconds_until_refused(lambda now_s: 0.08, 3 * TIMEOUT_S, lambda number: False) is None


@pytest.mark.parametrize("waits", [False, True])
def test_a_stall_of_a_paced_stream_is_not_its_clients_fault(waits: bool) -> None:
    """A paced stream sends at the playing rate and therefore never makes up for a stall. Its client
    is not refused, because the server reports the time spent on pacing through `note_wait`.
    """

    async def scenario() -> None:
        window = DeliveryWindow(TIMEOUT_S, FPS)

        async def send(number: int) -> None:
            if waits and number != 20:
                window.note_wait()
            await asyncio.sleep(0.8 * TIMEOUT_S if number == 20 else CHUNK / FPS)

        for number in range(100):
            await window.deliver(send(number), CHUNK, lambda: True)

    if waits:
        run_in_virtual_time(scenario())
    else:
        with pytest.raises(EndpointError, match="slow_reader"):
            run_in_virtual_time(scenario())


def test_the_error_is_typed() -> None:
    """The error for a slow reader has a code and a close code, and is marked as retryable."""

    async def slow() -> None:
        window = DeliveryWindow(0.05, FPS)
        while True:
            await window.deliver(asyncio.sleep(0.02), 1, lambda: True)

    with pytest.raises(EndpointError) as refused:
        run_in_virtual_time(slow())
    error = refused.value
    assert (error.code, error.close, error.retryable) == (
        "slow_reader",
        WebSocketCloseCode.SLOW_CONSUMER,
        True,
    )


def test_a_timeout_of_zero_disables_the_check() -> None:
    """A timeout of 0 disables the check."""
    delivered: list[int] = []

    async def deliver(number: int) -> None:
        await asyncio.sleep(0.2)
        delivered.append(number)

    async def scenario() -> None:
        window = DeliveryWindow(0, FPS)
        for number in range(3):
            await window.deliver(deliver(number), 1, lambda: True)

    run_in_virtual_time(scenario())
    assert delivered == [0, 1, 2]


def test_a_timeout_of_the_delivery_is_raised_unchanged() -> None:
    """A TimeoutError raised by the delivery itself is not attributed to a slow reader."""

    async def fails() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        run_in_virtual_time(DeliveryWindow(1.0, FPS).deliver(fails(), 1, lambda: True))


class Peer:
    """A simulated WebSocket that takes `seconds_a_message` to accept each message."""

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


def connect_peer(seconds_a_message: float) -> tuple[Peer, Connection]:
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
    """A cancelled group of messages is sent completely or not at all. The peer treats the message
    after a header as the header's payload, so no other message may come between the two.
    """

    async def scenario() -> None:
        peer, connection = connect_peer(0.5)
        group = asyncio.ensure_future(connection.send(b"1", b"2", b"3"))
        await asyncio.sleep(cancelled_after_s)
        other = asyncio.ensure_future(connection.send(b"other"))
        group.cancel()
        await other
        assert group.cancelled()
        assert peer.taken == taken

    run_in_virtual_time(scenario())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_peer_that_does_not_read_is_closed_at_the_deadline(is_cancelled: bool) -> None:
    """The connection to a peer that does not read is closed at the deadline, even if the sender is
    cancelled, and the next send finds the connection closed.
    """

    async def scenario() -> None:
        peer, connection = connect_peer(2.0)
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
