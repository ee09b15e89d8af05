# SPDX-License-Identifier: Apache-2.0
"""DeliveryWindow: who keeps up with what it plays, who does not, and for how long that is borne."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from virtual_time import run_in_virtual_time

from vllm_omni.entrypoints.errors import Close, EndpointError
from vllm_omni.entrypoints.realtime.connection.delivery_window import DeliveryWindow

TIMEOUT_S, FPS = 0.4, 200.0
CHUNK = 4  # frames: 20 ms of video


def seconds_until_refused(
    take_s: Callable[[float], float],
    for_s: float,
    is_more_waiting: Callable[[int], bool] = lambda number: True,
    fps: float = FPS,
) -> float | None:
    """Each chunk takes `take_s(now)` to read; None if nothing was said in `for_s`.

    is_more_waiting: whether the chunk after this one, by its number, was ready already.
    """

    async def scenario() -> float | None:
        pace = DeliveryWindow(TIMEOUT_S, fps)
        clock = asyncio.get_running_loop().time
        started_s = clock()
        number = 0
        while (now_s := clock() - started_s) < for_s:
            number += 1
            try:
                await pace.deliver(
                    asyncio.sleep(take_s(now_s)), CHUNK, partial(is_more_waiting, number)
                )
            except EndpointError:
                return clock() - started_s
        return None

    return run_in_virtual_time(scenario())


def test_a_quarter_of_the_rate_is_borne_for_the_timeout() -> None:
    """And not a message longer: it ends in the middle of one."""
    assert seconds_until_refused(lambda now_s: 0.08, 2.0) == pytest.approx(TIMEOUT_S, abs=0.06)
    assert seconds_until_refused(lambda now_s: 0.08 if now_s < 0.3 else 9.0, 2.0) == pytest.approx(
        TIMEOUT_S, abs=0.06
    )


@pytest.mark.parametrize("take_s", [0.001, 0.004, 0.015])
def test_a_client_that_takes_what_it_plays_is_not_behind(take_s: float) -> None:
    """Though more is always waiting: a model faster than real time keeps every queue full."""
    assert seconds_until_refused(lambda now_s: take_s, 3 * TIMEOUT_S) is None


@pytest.mark.parametrize(
    "chunk_s", [TIMEOUT_S * share for share in (0.1, 1.5 / 7, 4 / 7, 0.99, 1.5, 4.0)]
)
def test_a_chunk_may_play_for_as_long_as_it_likes(chunk_s: float) -> None:
    """Taken at exactly the playing rate, as a stream that the server itself paces: whatever part of
    the timeout that is. At half of it the end comes, a chunk's time later than with short chunks.
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
    """What was taken quickly before does not buy more than one timeout."""
    slow_from_s = 0.6
    refused_s = seconds_until_refused(lambda now_s: 0.002 if now_s < slow_from_s else 0.1, 3.0)
    assert refused_s is not None
    assert slow_from_s < refused_s < slow_from_s + TIMEOUT_S + 0.1


def test_catching_up_ends_it() -> None:
    """Behind again and again, but never for the whole timeout."""
    assert (
        seconds_until_refused(lambda now_s: 0.03, 4 * TIMEOUT_S, lambda number: number % 10 < 7)
        is None
    )


def test_a_reader_that_takes_gulps_is_behind_all_the_same() -> None:
    """Each gulp empties the server's queue for a moment."""
    refused_s = seconds_until_refused(lambda now_s: 0.03, 3.0, lambda number: number % 3 > 0)
    assert refused_s == pytest.approx(TIMEOUT_S, abs=0.15)


def test_a_model_slower_than_real_time_is_not_its_clients_fault() -> None:
    """They take little, since little is made: nothing waits for them."""
    assert seconds_until_refused(lambda now_s: 0.08, 3 * TIMEOUT_S, lambda number: False) is None


def test_the_error_is_typed() -> None:
    """A code to switch on, a close code, and that it may be tried again."""

    async def slow() -> None:
        pace = DeliveryWindow(0.05, FPS)
        while True:
            await pace.deliver(asyncio.sleep(0.02), 1, lambda: True)

    with pytest.raises(EndpointError) as refused:
        run_in_virtual_time(slow())
    error = refused.value
    assert (error.code, error.close, error.retryable) == ("slow_reader", Close.SLOW_CONSUMER, True)


def test_never_is_never() -> None:
    """0 switches it off: every delivery is waited for, and a client that stays behind is kept."""
    delivered: list[int] = []

    async def deliver(number: int) -> None:
        await asyncio.sleep(0.2)
        delivered.append(number)

    async def scenario() -> None:
        pace = DeliveryWindow(0, FPS)
        for number in range(3):
            await pace.deliver(deliver(number), 1, lambda: True)

    run_in_virtual_time(scenario())
    assert delivered == [0, 1, 2]


def test_a_delivery_s_own_timeout_stays_its_own() -> None:
    """Only our clock makes it a slow reader."""

    async def fails() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        run_in_virtual_time(DeliveryWindow(1.0, FPS).deliver(fails(), 1, lambda: True))
