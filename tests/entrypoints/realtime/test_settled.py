# SPDX-License-Identifier: Apache-2.0
"""`settled`: whoever waits for a chunk of the engine is woken by its end, and may stop waiting."""

import asyncio

import pytest
from virtual_time import run_in_virtual_time

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.settled import settled


async def response() -> str:
    await asyncio.sleep(2.0)
    return "chunk"


async def refusal() -> str:
    await asyncio.sleep(2.0)
    raise EndpointError("capacity", "no room")


@pytest.mark.parametrize("request_chunk", [response, refusal])
def test_waiting_ends_with_the_request_however_it_ends(request_chunk) -> None:
    """At once for a request that has ended before."""

    async def scenario() -> None:
        task = asyncio.create_task(request_chunk())
        for _ in range(2):
            await settled(task)
            assert asyncio.get_running_loop().time() == 2.0
            assert task.done()
        if request_chunk is response:
            assert task.result() == "chunk"
        else:
            assert isinstance(task.exception(), EndpointError)

    run_in_virtual_time(scenario())


def test_the_request_continues_when_waiting_is_cancelled() -> None:
    """And may be waited for again."""

    async def scenario() -> None:
        task = asyncio.create_task(response())
        waiting = asyncio.create_task(settled(task))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not task.done()
        await settled(task)
        assert task.result() == "chunk"

    run_in_virtual_time(scenario())


def test_waiting_ends_when_someone_else_cancels_the_request_before_it_starts() -> None:
    """As the end of the event loop does with every task."""

    async def scenario() -> None:
        asyncio.get_running_loop().call_soon(lambda: task.cancel())
        task = asyncio.create_task(response())
        await settled(task)
        assert task.cancelled()

    run_in_virtual_time(scenario())
