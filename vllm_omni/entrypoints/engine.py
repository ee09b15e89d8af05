# SPDX-License-Identifier: Apache-2.0
"""`OmniEngine`: every door's way to vLLM's engine. One call = one pooling request (a chunk, some images, a video).

Everything here is stock `EngineClient` surface: `encode`, `abort`, `collective_rpc`. Torch stops at this file: doors
see NumPy. Failures are `RequestFailed` with the codes of the worker (`capacity` also for an engine that is paused or
whose queue is full), and three more made here: `cancelled` (the engine ended the request), `engine_error` (it failed
on it) and `engine_dead` (nothing will be answered any more). Held by tests/entrypoints/test_engine_refusals.py.

With data parallelism a request is sent to the rank that `SessionRanks` names (`AsyncLLM.add_request`, because stock
`encode` takes no rank), and the workers' answers are gathered over all ranks.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError, GracefulHTTPError, RetryableRequestError, VLLMClientError
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_omni import log_context
from vllm_omni.entrypoints.ranks import SessionRanks
from vllm_omni.entrypoints.tracing import tracing
from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.outputs import RequestFailed, unpack_arrays
from vllm_omni.processes import machine_id
from vllm_omni.sessions.snapshot import SnapshotHeader
from vllm_omni.sessions.snapshot_exchange import (
    Call,
    Exchange,
    checkpoint_exchange,
    package_version,
    restore_exchange,
    run_exchange_async,
    save_exchange,
)

logger = logging.getLogger("vllm." + __name__)

T = TypeVar("T")

_DEAD: Final = "the engine has stopped"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class OmniEngine:
    """ranks: where sessions are, shared by all users of `client`; None = there is one rank."""

    def __init__(self, client: EngineClient, ranks: SessionRanks | None = None) -> None:
        self._client = client
        self._process, self._numbers = secrets.token_hex(8), itertools.count()  # of requests: unique in the engine
        self._ranks = ranks if ranks is not None and ranks.size > 1 else None
        self._logs_chunks = logger.isEnabledFor(logging.DEBUG)

    @property
    def is_dead(self) -> bool:
        return bool(self._client.errored)

    def run(
        self, params: DiffusionParams, arrays: Mapping[str, np.ndarray]
    ) -> Coroutine[Any, Any, tuple[dict[str, Any], dict[str, np.ndarray]]]:
        """Run one request: `(meta, arrays)`, the arrays being views into the engine's answer.

        Raises `RequestFailed`. When cancelled, the engine drops the request before its next denoise step.
        """
        if self._ranks is None:
            return self._run(params, arrays, None)
        return self._ranks.route(params, lambda rank: self._run(params, arrays, rank))

    async def _run(
        self, params: DiffusionParams, arrays: Mapping[str, np.ndarray], rank: int | None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        # The engine's log lines name a request by this.
        request_id = "-".join(["omni", *log_context.current().values(), self._process, str(next(self._numbers))])
        sent_s = time.monotonic()
        try:
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()} if arrays else None
            answer: PoolingRequestOutput | None = None
            async for output in self._answers(params.to_pooling_params(tensors), request_id, rank):
                answer = output
            if answer is None or answer.outputs.data.numel() == 0:  # stock vLLM's answer to an aborted request
                raise RequestFailed("cancelled", "the request was cancelled")
            meta, results = unpack_arrays(answer.outputs.data)
            if self._logs_chunks and "chunk_index" in meta:
                _log_chunk(meta, time.monotonic() - sent_s)
            return meta, results
        except asyncio.CancelledError:
            await self._client.abort(request_id)  # a dropped `encode` generator does not; unknown ids are ignored
            raise
        except RequestFailed as failure:
            # The engine knows sessions by ids made here; a client knows its own.
            raise RequestFailed(
                failure.code, failure.message.replace(repr(params.session_id), "this session")
            ) from None
        except EngineDeadError:
            raise RequestFailed("engine_dead", _DEAD) from None
        except VLLMClientError as error:
            raise RequestFailed("invalid_request", "the engine refused the request") from error
        except (RetryableRequestError, GracefulHTTPError) as error:  # paused, or its queue is full
            raise RequestFailed("capacity", "the engine takes no requests now; try again later") from error
        except (EngineGenerateError, GenerationError) as error:
            if self.is_dead:  # with several ranks, those that stock vLLM stops after another's death end like this
                raise RequestFailed("engine_dead", _DEAD) from None
            raise RequestFailed(
                "engine_error", "the engine failed on this request; the server's log has details"
            ) from error

    def _answers(self, params: PoolingParams, request_id: str, rank: int | None) -> AsyncIterator[PoolingRequestOutput]:
        """The engine's answers to one request; the last one is whole."""
        headers = tracing().engine_headers()
        trace: dict[str, Any] = {} if headers is None else {"trace_headers": headers}
        if rank is None:
            return self._client.encode(engine_prompt(), params, request_id, **trace)
        return self._answer_of_rank(params, request_id, rank, trace)

    async def _answer_of_rank(
        self, params: PoolingParams, request_id: str, rank: int, trace: dict[str, Any]
    ) -> AsyncIterator[PoolingRequestOutput]:
        assert isinstance(self._client, AsyncLLM), "only vLLM's own client has several ranks"
        queue = await self._client.add_request(request_id, engine_prompt(), params, data_parallel_rank=rank, **trace)
        try:
            yield queue.get_nowait() or await queue.get()  # type: ignore[misc]
        except (asyncio.CancelledError, EngineDeadError, VLLMClientError, GracefulHTTPError, GenerationError):
            raise
        except Exception as error:  # as stock `encode` does
            await self._client.abort(request_id)
            raise EngineGenerateError from error
        finally:
            queue.close()

    async def run_when_room(
        self, params: DiffusionParams, arrays: Mapping[str, np.ndarray], *, timeout_s: float, wait_s: float
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Like `run`, but while the engine answers `capacity`, ask again for up to `wait_s`.

        timeout_s: an attempt that takes longer is aborted. Raises `RequestFailed`, also with `timeout`.
        """
        give_up_s = time.monotonic() + wait_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.run(params, arrays)
            except RequestFailed as failure:
                if failure.code != "capacity" or time.monotonic() > give_up_s:
                    raise
            except TimeoutError:
                raise RequestFailed("timeout", "the engine took too long; the request was dropped") from None
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)

    async def close(self, session_id: str) -> None:
        """Free a session's state; unknown ids are fine. Raises `RequestFailed`."""
        await self.run(DiffusionParams(session_id=session_id, op="close"), {})

    async def progress(self) -> dict[str, tuple[int, int]]:
        """`{session id: (steps done, steps in all)}` of the requests in flight. Raises `RequestFailed`."""
        ranks = await self._rpc("request_progress")
        return {str(name): (int(done), int(total)) for rank in ranks for name, (done, total) in rank.items()}

    async def session_stats(self) -> list[dict[str, Any]]:
        """`sessions`, `max_sessions`, `bytes`, `max_bytes` of each data-parallel rank. Raises `RequestFailed`."""
        return await self._rpc("session_stats")

    async def process_ids(self) -> list[int]:
        """The engine's processes on this machine: workers, and engine cores beside them. Raises `RequestFailed`."""
        machine = machine_id()
        workers = [dict(answer) for answers in await self._ask_everybody("engine_processes") for answer in answers]
        return sorted({int(pid) for worker in workers if worker["machine"] == machine for pid in worker["pids"]})

    async def save_session(self, session_id: str, path: Path, owner: Mapping[str, str] | None) -> SnapshotHeader:
        """Write a session, as its last finished chunk left it, to the new file `path`. Raises `RequestFailed`."""
        return await self._exchange(save_exchange(session_id, path, package_version(), owner), session_id)

    async def checkpoint_session(
        self, session_id: str, path: Path, owner: Mapping[str, str] | None
    ) -> tuple[SnapshotHeader, float]:
        """The same while the engine goes on: `(header, seconds that it cost the engine)`. Raises `RequestFailed`."""
        return await self._exchange(checkpoint_exchange(session_id, path, package_version(), owner), session_id)

    async def _exchange(self, exchange: Exchange[T], session_id: str) -> T:
        """Run an exchange about a live session with the workers of its rank."""
        rank = None if self._ranks is None else self._ranks.rank_of(session_id)
        return await run_exchange_async(exchange, lambda call: self._ask_workers(call, rank))

    async def restore_session(self, session_id: str, path: Path) -> tuple[SnapshotHeader, dict[str, Any]]:
        """Make a session of a file under a new id: `(header, scalars)`. Raises `RequestFailed`."""
        if self._ranks is not None and self._ranks.rank_of(session_id) is not None:
            raise RequestFailed("session_exists", "a session of this id is live here")
        rank = self._ranks.adopt(session_id) if self._ranks is not None else None
        try:
            exchange = restore_exchange(session_id, path, rank)
            return await run_exchange_async(exchange, lambda call: self._ask_workers(call, rank))
        except BaseException:
            if self._ranks is not None:
                self._ranks.forget(session_id)
            raise

    async def _ask_workers(self, call: Call, rank: int | None) -> list[dict[str, Any]]:
        """Ask all workers of one data-parallel rank (the others are asked as well, and refuse or do nothing)."""
        return (await self._ask_everybody(call.method, call.args))[rank or 0]

    async def _rpc(self, method: str) -> list[dict[str, Any]]:
        """Ask the first worker of every data-parallel rank; waits for the engine steps that run."""
        return [dict(answers[0]) for answers in await self._ask_everybody(method)]

    async def _ask_everybody(self, method: str, args: tuple[Any, ...] = ()) -> list[list[Any]]:
        """Ask all workers of every data-parallel rank: for each rank, its workers' answers."""
        try:
            if self._ranks is None:
                return [await self._client.collective_rpc(method, args=args)]
            assert isinstance(self._client, AsyncLLM) and isinstance(self._client.engine_core, AsyncMPClient)
            # Stock `collective_rpc` asks every rank and returns the first one's answer.
            core = self._client.engine_core
            answers: list[list[Any]] = await core.call_utility_all_async("collective_rpc", method, None, args, None)
            return answers
        except EngineDeadError:
            raise RequestFailed("engine_dead", _DEAD) from None
        except Exception as error:  # boundary: the worker's exception arrives as a plain one
            logger.debug("worker RPC %s failed", method, exc_info=True)
            raise RequestFailed("engine_error", f"the worker did not answer {method}") from error


def _log_chunk(meta: Mapping[str, Any], wall_s: float) -> None:
    """One line for each chunk of any endpoint. wall_s: from the request to its result."""
    stages = " ".join(f"{name}={sum(times):.1f}" for name, times in meta.get("timings_ms", {}).items())
    logger.debug(
        "chunk index=%s first_frame=%s frames=%s wall_ms=%.1f %s",
        *(meta["chunk_index"], meta.get("first_frame"), meta.get("num_frames"), wall_s * 1e3, stages),
    )
