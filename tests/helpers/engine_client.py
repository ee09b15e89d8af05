# SPDX-License-Identifier: Apache-2.0
"""Drives a real engine (`AsyncLLM` with an EngineCore and worker processes) chunk by chunk."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from helpers.waits import seconds
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.outputs import unpack

STOCK_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
SHARED_GPU = {
    "worker_cls": "vllm_omni.worker.SharedGPUWorker",
    "distributed_executor_backend": "mp",  # set explicitly, because vLLM would otherwise count GPUs
}

Result = TypeVar("Result")


class EngineClient:
    """A thin wrapper around the engine client that builds requests as any client would."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self._numbers = itertools.count()

    async def send(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Run one request to completion.

        Raises:
            RequestFailed: The request failed. The exception holds the error that a client would
                receive.
        """
        request_id = request_id or f"request-{next(self._numbers)}"
        params = DiffusionParams(**fields).to_pooling_params(tensors)
        async for output in self.engine.encode(engine_prompt(), params, request_id):
            last = output
        return unpack(last.outputs.data)

    async def chunks(self, session_id: str, count: int, **fields: Any) -> list[torch.Tensor]:
        """Generate `count` chunks of a single session in sequence and return their latents."""
        latents = []
        for index in range(count):
            prompt = "a field" if index == 0 else None
            result = await self.send(
                session_id=session_id, chunk_index=index, prompt=prompt, output="latents", **fields
            )
            latents.append(result[1]["latents"].clone())
        return latents

    async def until_at_step(self, session_id: str, step: int) -> list[int]:
        """Wait until the first rank has finished `step` steps of the session's request.

        Returns:
            `[finished steps, total steps]`.
        """
        async with asyncio.timeout(seconds(60)):
            while True:
                progress = (await self.progress()).get(session_id, [0, 0])
                if progress[0] >= step:
                    return progress
                await asyncio.sleep(0)

    async def until_disconnected(self, session_id: str) -> None:
        """Wait until the first rank is running no request for the session."""
        async with asyncio.timeout(seconds(60)):
            while session_id in await self.progress():
                await asyncio.sleep(0)

    async def progress(self) -> dict[str, list[int]]:
        """Return the first rank's progress: `[finished steps, total steps]` by session."""
        return (await self.engine.collective_rpc("request_progress"))[0]  # type: ignore[no-any-return]

    async def stats(self) -> dict[str, Any]:
        """Return the last rank's session statistics. Earlier pipeline stages record a commit one
        step later.
        """
        return (await self.engine.collective_rpc("session_stats"))[-1]


@dataclass(frozen=True)
class SharedEngine:
    """An engine and its event loop, used by several tests in turn."""

    client: EngineClient
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.runner.run(work)

    def clear(self) -> None:
        """Close every session, so that the next test finds no sessions in the engine."""

        async def close() -> None:
            for session_id in (await self.client.stats())["chunks"]:
                await self.client.send(session_id=session_id, op="close")

        self.run(close())


@contextlib.contextmanager
def shared_engine(*args: Any, **kwargs: Any) -> Iterator[SharedEngine]:
    """Run `running_engine` for a fixture with module or package scope."""
    with asyncio.Runner() as runner:
        engine = running_engine(*args, **kwargs)
        yield SharedEngine(runner.run(engine.__aenter__()), runner)
        runner.run(engine.__aexit__(None, None, None))


@contextlib.asynccontextmanager
async def running_engine(
    model: Path, omni: Mapping[str, Any] | None = None, **engine_args: Any
) -> AsyncIterator[EngineClient]:
    """Start a small engine on `model`. At the end, stop the engine and all of its processes."""
    size = engine_args.get("tensor_parallel_size", 1) * engine_args.get("pipeline_parallel_size", 1)
    # Each rank is bound to one core, because vLLM would otherwise require a NUMA node for each
    # rank.
    cores = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(size))
    # Without this setting, vLLM would bind the first rank of every engine to the same core.
    several_engines = (
        "data_parallel_size" in engine_args
        or engine_args.get("distributed_executor_backend") == "ray"
    )
    bind = (
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind" if several_engines else cores}
        if several_engines or size > 1
        else {}
    )
    if torch.cuda.is_available():
        engine_args.setdefault("gpu_memory_utilization", 0.4)  # leave room for another engine
        if size > torch.cuda.device_count():
            engine_args = {**SHARED_GPU, **engine_args}
    with _environment(**bind):
        args = AsyncEngineArgs(
            model=str(model),
            config_format="omni",
            skip_tokenizer_init=True,
            enforce_eager=True,
            additional_config={"omni": {"height": 32, "width": 48, **(omni or {})}},
            **engine_args,
        )
        engine = AsyncLLM.from_engine_args(args)
    try:
        yield EngineClient(engine)
    finally:
        engine.shutdown()


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
