# SPDX-License-Identifier: Apache-2.0
"""`settled`: wait for a request of the engine without its result."""

import asyncio

import pytest
from virtual_time import run_in_virtual_time

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.settled import settled


async def chunk_response() -> str:
    await asyncio.sleep(2.0)
    return "chunk"


async def refusal() -> str:
    await asyncio.sleep(2.0)
    raise EndpointError("capacity", "no room")


@pytest.mark.parametrize("request_chunk", [chunk_response, refusal])
def test_waiting_ends_with_the_result_or_error_of_the_request(request_chunk) -> None:
    """Waiting for a finished request returns immediately."""

    async def scenario() -> None:
        task = asyncio.create_task(request_chunk())
        for _ in range(2):
            await settled(task)
            assert asyncio.get_running_loop().time() == 2.0
            assert task.done()
        if request_chunk is chunk_response:
            assert task.result() == "chunk"
        else:
            assert isinstance(task.exception(), EndpointError)

    run_in_virtual_time(scenario())


def test_the_request_continues_when_waiting_is_cancelled() -> None:
    """The same request can be awaited again."""

    async def scenario() -> None:
        task = asyncio.create_task(chunk_response())
        waiting = asyncio.create_task(settled(task))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not task.done()
        await settled(task)
        assert task.result() == "chunk"

    run_in_virtual_time(scenario())


def test_waiting_ends_if_the_request_is_cancelled_before_it_starts() -> None:
    """The event loop cancels each task in this way when it ends."""

    async def scenario() -> None:
        asyncio.get_running_loop().call_soon(lambda: task.cancel())
        task = asyncio.create_task(chunk_response())
        await settled(task)
        assert task.cancelled()

    run_in_virtual_time(scenario())
