# SPDX-License-Identifier: Apache-2.0
"""`AskedChunk`: whoever waits for a chunk of the engine is woken by its end, and may stop waiting."""

import asyncio
from typing import cast

import pytest
from virtual_time import run_in_virtual_time

from vllm_omni.entrypoints.realtime.asked_chunk import AskedChunk
from vllm_omni.entrypoints.realtime.engine import ChunkResult
from vllm_omni.entrypoints.realtime.errors import DoorError

RESULT = cast(ChunkResult, object())


async def answer() -> ChunkResult:
    await asyncio.sleep(2.0)
    return RESULT


async def refusal() -> ChunkResult:
    await asyncio.sleep(2.0)
    raise DoorError("capacity", "no room")


@pytest.mark.parametrize("request_chunk", [answer, refusal])
def test_waiting_ends_with_the_request_however_it_ends(request_chunk) -> None:
    """At once for a request that has ended before."""

    async def scenario() -> None:
        asked = AskedChunk(request_chunk)
        for _ in range(2):
            await asked.settled()
            assert asyncio.get_running_loop().time() == 2.0
            assert asked.task.done()
        if request_chunk is answer:
            assert asked.task.result() is RESULT
        else:
            assert isinstance(asked.task.exception(), DoorError)

    run_in_virtual_time(scenario())


def test_the_request_goes_on_when_waiting_is_cancelled() -> None:
    """And may be waited for again."""

    async def scenario() -> None:
        asked = AskedChunk(answer)
        waiting = asyncio.ensure_future(asked.settled())
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not asked.task.done()
        await asked.settled()
        assert asked.task.result() is RESULT

    run_in_virtual_time(scenario())


def test_a_request_cancelled_before_it_began_leaves_nothing_behind() -> None:
    """No coroutine is made that nobody awaits (a warning would fail the test)."""

    async def scenario() -> None:
        asked = AskedChunk(answer)
        asked.task.cancel()
        await asyncio.wait([asked.task])
        assert asked.task.cancelled()
        await asked.settled()

    run_in_virtual_time(scenario())
