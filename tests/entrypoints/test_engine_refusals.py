# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised by vLLM's front end reach endpoints as `RequestFailed`. If a composed engine is
served, the exception also names the engine that failed.
"""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import (
    GenerationError,
    QueueOverflowError,
    RetryableRequestError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_omni.composition.composed_engine import ComposedEngine, ComposedEngineDied
from vllm_omni.entrypoints.engine import client as client_module
from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed, pack

REFUSALS = [
    pytest.param(VLLMValidationError("too long"), "invalid_request", id="refused"),
    pytest.param(RetryableRequestError("paused"), "capacity", id="paused (0.33)"),
    pytest.param(QueueOverflowError(), "capacity", id="queue full"),
    pytest.param(GenerationError("broken"), "engine_error", id="failed (0.33)"),
    pytest.param(EngineGenerateError("broken"), "engine_error", id="failed"),
    pytest.param(EngineDeadError(), "engine_dead", id="dead"),
]


class RaisingClient:
    """A vLLM client that raises `error` for every request."""

    errored = False

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.aborted: list[str] = []

    async def encode(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        raise self.error
        yield

    generate = encode

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def shutdown(self) -> None: ...


@pytest.mark.parametrize(("error", "code"), REFUSALS)
def test_an_endpoint_gets_one_type_of_failure(error: Exception, code: str) -> None:
    """Every failure reaches an endpoint as a `RequestFailed`, and its code determines what happens
    next. For example, `capacity` is temporary, so `run_when_room` waits until a session fits.
    """

    async def scenario() -> None:
        engine = OmniEngine(RaisingClient(error))  # type: ignore[arg-type]
        with pytest.raises(RequestFailed) as failed:
            await engine.run_request(DiffusionParams(session_id="s", chunk_index=0), {})
        assert failed.value.code == code

    asyncio.run(scenario())


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(client_module, "_LONGEST_PAUSE_S", 0.0)


@pytest.mark.parametrize("aborts", [False, True], ids=["refuses", "aborts"])
@pytest.mark.usefixtures("no_pauses")
def test_a_session_is_closed_once_the_engine_runs_requests_again(aborts: bool) -> None:
    """A paused engine refuses or aborts requests. A session whose close it did not run would belong
    to nobody, and nothing would free its memory. The caller does not wait for the engine.
    """

    class Resuming(RaisingClient):
        attempts = 0
        is_paused = True

        async def encode(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
            self.attempts += 1
            if self.is_paused and not aborts:
                raise self.error
            data = torch.empty(0) if self.is_paused else pack({}, {})
            yield SimpleNamespace(outputs=SimpleNamespace(data=data))

    async def scenario() -> None:
        client = Resuming(RetryableRequestError("paused"))
        engine = OmniEngine(client)  # type: ignore[arg-type]
        await engine.close_session("s")
        assert client.attempts == 1
        while client.attempts < 3:
            await asyncio.sleep(0)
        client.is_paused = False
        while engine._closing:
            await asyncio.sleep(0)
        assert client.attempts == 4

    asyncio.run(scenario())


@pytest.mark.usefixtures("no_pauses")
def test_a_close_is_not_repeated_when_the_engine_has_died() -> None:
    client = RaisingClient(RetryableRequestError("paused"))

    async def scenario() -> None:
        engine = OmniEngine(client)  # type: ignore[arg-type]
        await engine.close_session("s")
        client.error = EngineDeadError()
        while engine._closing:
            await asyncio.sleep(0)
        with pytest.raises(RequestFailed, match="engine_dead"):
            await engine.close_session("s")

    asyncio.run(scenario())


@pytest.mark.parametrize(("error", "code"), REFUSALS)
def test_a_rank_of_several_fails_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    """With several ranks, results are read from vLLM's queue rather than from `encode`, but
    failures are reported with the same codes as with a single rank.
    """
    from vllm_omni.entrypoints.engine.session_placement import SessionPlacement

    class Queue:
        def get_nowait(self) -> None: ...

        async def get(self) -> Any:
            raise error

        def close(self) -> None: ...

    class Client(RaisingClient):
        async def add_request(self, *args: Any, **kwargs: Any) -> Queue:
            return Queue()

    monkeypatch.setattr(client_module, "AsyncLLM", Client)

    async def scenario() -> None:
        engine = OmniEngine(Client(error), SessionPlacement(2))  # type: ignore[arg-type]
        with pytest.raises(RequestFailed) as failed:
            await engine.run_request(DiffusionParams(session_id="s", chunk_index=0), {})
        assert failed.value.code == code

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["encode", "generate"])
@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (
            RetryableRequestError("paused"),
            RequestFailed,
            "capacity: engine 'talker' takes no requests now",
        ),
        (QueueOverflowError(), RequestFailed, "capacity: engine 'talker' takes no requests now"),
        (GenerationError("broken"), RuntimeError, "engine 'talker' failed on a request"),
        (EngineGenerateError("broken"), RuntimeError, "engine 'talker' failed on a request"),
        (EngineDeadError(), ComposedEngineDied, "engine 'talker' has died"),
    ],
)
def test_a_failure_of_a_composed_engine_names_it(
    method: str, error: Exception, raised: type[Exception], words: str
) -> None:
    """A composed engine raises different exceptions for a refusal, a failure and a dead engine.
    Each message names the engine that failed.
    """

    async def call(engine: ComposedEngine) -> None:
        if method == "encode":
            await engine.encode(DiffusionParams(session_id="s", chunk_index=0), {}, "r")
        else:
            params: Any = SimpleNamespace()
            async for _ in engine.generate("prompt", params, "r"):
                pass

    with pytest.raises(raised, match=words):
        asyncio.run(call(ComposedEngine("talker", RaisingClient(error))))  # type: ignore[arg-type]
