# SPDX-License-Identifier: Apache-2.0
"""`OmniEngine`: the interface through which all endpoints use vLLM's engine.

Each generation call is one pooling request that produces a chunk, a set of images or a video.
Without data parallelism, `OmniEngine` uses only public methods of the stock `EngineClient`
(`encode`, `abort`, `collective_rpc`). It converts between NumPy and torch, so endpoints handle only
NumPy arrays.

A failed request raises `RequestFailed` with the worker's error code. This module adds four codes:
`cancelled` (the engine ended the request), `timeout` (an attempt in `run_when_room` took too long),
`engine_error` (the request failed in the engine) and `engine_dead` (the engine has stopped). If the
engine is paused or its queue is full, the code is `capacity`, which workers also use.

With data parallelism, `SessionPlacement` selects each request's data-parallel rank. The request is
then sent through `AsyncLLM.add_request`, because the stock `encode` has no rank argument. Worker
calls use the engine core client, because the stock `collective_rpc` returns only the first rank's
results.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from vllm.engine.protocol import EngineClient
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
)
from vllm.outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_omni.entrypoints.engine.session_placement import SessionPlacement
from vllm_omni.entrypoints.telemetry.tracing import tracing
from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.model_executor.layers.fast_path import FastPath, joined
from vllm_omni.outputs import RequestFailed, unpack_arrays
from vllm_omni.runtime import log_context
from vllm_omni.runtime.processes import machine_id
from vllm_omni.session_files.snapshot import SnapshotHeader
from vllm_omni.session_files.snapshot_exchange import (
    Exchange,
    WorkerCall,
    copy_exchange,
    live_save_exchange,
    package_version,
    restore_exchange,
    run_exchange_async,
    save_exchange,
    update_exchange,
)

logger = logging.getLogger("vllm." + __name__)

T = TypeVar("T")

_DEAD: Final = "the engine has stopped"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_NOT_RUN = frozenset({"cancelled", "capacity"})
"""Codes of requests that the engine has not run: `cancelled` if a pause aborted them."""


def _pauses_s() -> Iterator[float]:
    """Yield the pauses in seconds between attempts to run a request. They grow up to a limit."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)


class OmniEngine:
    """Sends requests and collective calls to vLLM's engine.

    Args:
        client: vLLM's engine client.
        placement: Table that maps sessions to data-parallel ranks. All objects that use `client`
            share it. Default: the engine has one data-parallel rank.
    """

    def __init__(self, client: EngineClient, placement: SessionPlacement | None = None) -> None:
        self._client = client
        # The engine requires unique request ids.
        self._process, self._numbers = secrets.token_hex(8), itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._placement = placement if placement is not None and placement.size > 1 else None
        self._logs_chunks = logger.isEnabledFor(logging.DEBUG)

    @property
    def is_dead(self) -> bool:
        return bool(self._client.errored)

    def run_request(
        self, params: DiffusionParams, arrays: Mapping[str, np.ndarray]
    ) -> Coroutine[Any, Any, tuple[dict[str, Any], dict[str, np.ndarray]]]:
        """Run one request.

        Cancelling the call aborts the request. Denoise steps that have already been launched still
        run; there are at most two.

        Args:
            params: Request parameters.
            arrays: Input arrays by name.

        Returns:
            `(meta, arrays)`: the result's metadata, and its arrays as views of the engine's result.

        Raises:
            RequestFailed: The request was refused, was aborted or failed.
        """
        if self._placement is None:
            return self._run(params, arrays, None)
        return self._placement.route(params, lambda rank: self._run(params, arrays, rank))

    async def _run(
        self, params: DiffusionParams, arrays: Mapping[str, np.ndarray], rank: int | None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        # The engine's log lines contain this id.
        request_id = "-".join(
            ["omni", *log_context.current().values(), self._process, str(next(self._numbers))]
        )
        sent_s = time.monotonic()
        try:
            tensors = (
                {name: torch.from_numpy(array) for name, array in arrays.items()}
                if arrays
                else None
            )
            response: PoolingRequestOutput | None = None
            async for output in self._responses(
                params.to_pooling_params(tensors), request_id, rank
            ):
                response = output
            # This is what stock vLLM returns for an aborted request.
            if response is None or response.outputs.data.numel() == 0:
                raise RequestFailed("cancelled", "the request was cancelled")
            meta, results = unpack_arrays(response.outputs.data)
            if self._logs_chunks and "chunk_index" in meta:
                _log_chunk(meta, time.monotonic() - sent_s)
            return meta, results
        except asyncio.CancelledError:
            # Closing the `encode` generator does not abort. The engine ignores unknown ids.
            await self._client.abort(request_id)
            raise
        except RequestFailed as failure:
            # The message may contain the engine's id for the session, which clients do not know.
            raise RequestFailed(
                failure.code, failure.message.replace(repr(params.session_id), "this session")
            ) from None
        except EngineDeadError:
            raise RequestFailed("engine_dead", _DEAD) from None
        except VLLMClientError as error:
            raise RequestFailed("invalid_request", "the engine refused the request") from error
        except (RetryableRequestError, GracefulHTTPError) as error:  # paused, or its queue is full
            raise RequestFailed(
                "capacity", "the engine accepts no requests now; try again later"
            ) from error
        except (EngineGenerateError, GenerationError) as error:
            # If one of several data-parallel ranks dies, stock vLLM stops the others. Requests on
            # the stopped ranks raise these exceptions.
            if self.is_dead:
                raise RequestFailed("engine_dead", _DEAD) from None
            raise RequestFailed(
                "engine_error", "the engine failed on this request; the server's log has details"
            ) from error

    def _responses(
        self, params: PoolingParams, request_id: str, rank: int | None
    ) -> AsyncIterator[PoolingRequestOutput]:
        """Yield the engine's outputs for one request. The last output contains the complete
        result.
        """
        headers = tracing().engine_headers()
        trace: dict[str, Any] = {} if headers is None else {"trace_headers": headers}
        if rank is None:
            return self._client.encode(engine_prompt(), params, request_id, **trace)
        return self._response_of_rank(params, request_id, rank, trace)

    async def _response_of_rank(
        self, params: PoolingParams, request_id: str, rank: int, trace: dict[str, Any]
    ) -> AsyncIterator[PoolingRequestOutput]:
        assert isinstance(self._client, AsyncLLM), "only vLLM's own client has several ranks"
        queue = await self._client.add_request(
            request_id, engine_prompt(), params, data_parallel_rank=rank, **trace
        )
        try:
            yield queue.get_nowait() or await queue.get()  # type: ignore[misc]
        except (
            asyncio.CancelledError,
            EngineDeadError,
            VLLMClientError,
            GracefulHTTPError,
            GenerationError,
        ):
            raise
        except Exception as error:  # the same conversion as in stock `encode`
            await self._client.abort(request_id)
            raise EngineGenerateError from error
        finally:
            queue.close()

    async def run_when_room(
        self,
        params: DiffusionParams,
        arrays: Mapping[str, np.ndarray],
        *,
        timeout_s: float,
        wait_s: float,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Run one request and retry it while the engine refuses it with `capacity`.

        Args:
            params: Request parameters.
            arrays: Input arrays by name.
            timeout_s: Time limit per attempt in seconds. An attempt that takes longer is aborted.
            wait_s: Time in seconds for which the request is retried after `capacity`.

        Returns:
            `(meta, arrays)`, as returned by `run_request`.

        Raises:
            RequestFailed: The request failed as in `run_request`. The code is `timeout` if an
                attempt exceeds `timeout_s`.
        """
        give_up_s = time.monotonic() + wait_s
        pauses_s = _pauses_s()
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.run_request(params, arrays)
            except RequestFailed as failure:
                if failure.code != "capacity" or time.monotonic() > give_up_s:
                    raise
            except TimeoutError:
                raise RequestFailed(
                    "timeout", "the engine took too long, so the request was aborted"
                ) from None
            await asyncio.sleep(next(pauses_s))

    async def close_session(self, session_id: str) -> None:
        """Free a session's state. Unknown ids are ignored.

        If the engine does not run the request now, because it is paused, asleep or its queue is
        full, the request is repeated in the background until the engine runs it. On several ranks,
        nothing else would free the state.

        Raises:
            RequestFailed: The engine failed or has stopped.
        """
        params = DiffusionParams(session_id=session_id, op="close")
        try:
            await self.run_request(params, {})
        except RequestFailed as failure:
            if failure.code not in _NOT_RUN:
                raise
            task = asyncio.get_running_loop().create_task(self._close_later(params))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_later(self, params: DiffusionParams) -> None:
        for pause_s in _pauses_s():
            await asyncio.sleep(pause_s)
            try:
                await self.run_request(params, {})
                return
            except RequestFailed as failure:
                if failure.code not in _NOT_RUN:
                    logger.warning("the engine did not close a session: %s", failure)
                    return

    async def progress(self) -> dict[str, tuple[int, int]]:
        """Return `{session id: (finished steps, total steps)}` for the requests in flight.

        Raises:
            RequestFailed: The engine did not respond.
        """
        ranks = await self._rpc("request_progress")
        return {
            str(name): (int(done), int(total))
            for rank in ranks
            for name, (done, total) in rank.items()
        }

    async def session_stats(self) -> list[dict[str, Any]]:
        """Return the number and the total size of the sessions on each data-parallel rank.

        Returns:
            A list with one dict per rank. The keys of each dict include `sessions`, `max_sessions`,
            `bytes` and `max_bytes`.

        Raises:
            RequestFailed: The engine did not respond.
        """
        return await self._rpc("session_stats")

    async def fast_paths(self) -> list[FastPath]:
        """Return the engine's fast paths, merged over its data-parallel ranks by `joined`.

        Raises:
            RequestFailed: The engine did not respond.
        """
        ranks = await self._call_all_ranks("fast_paths")
        return joined([FastPath(**fields) for fields in responses[0]] for responses in ranks)

    async def process_ids(self) -> list[int]:
        """Return the process ids of the workers and engine cores on this machine.

        Raises:
            RequestFailed: The engine did not respond.
        """
        machine = machine_id()
        workers = [
            dict(response)
            for responses in await self._call_all_ranks("engine_processes")
            for response in responses
        ]
        return sorted(
            {
                int(pid)
                for worker in workers
                if worker["machine"] == machine
                for pid in worker["pids"]
            }
        )

    async def save_session(
        self, session_id: str, path: Path, owner: Mapping[str, str] | None
    ) -> SnapshotHeader:
        """Write a session's state, as of its last finished chunk, to a new file.

        Args:
            session_id: The engine's id for the session.
            path: File to create.
            owner: Session owner, which is written to the header. None: the session has no owner.

        Returns:
            The snapshot header.

        Raises:
            RequestFailed: The session is unknown or could not be written.
        """
        return await self._exchange(
            save_exchange(session_id, path, package_version(), owner), session_id
        )

    async def save_session_live(
        self, session_id: str, path: Path, owner: Mapping[str, str] | None
    ) -> tuple[SnapshotHeader, float]:
        """Write a session to a new file without pausing the engine.

        The arguments are the same as for `save_session`.

        Returns:
            `(header, seconds)`: the snapshot header, and the time in seconds that the engine spent
            on the snapshot.

        Raises:
            RequestFailed: The session is unknown or could not be written.
        """
        return await self._exchange(
            live_save_exchange(session_id, path, package_version(), owner), session_id
        )

    async def copy_session(
        self, session_id: str, path: Path, owner: Mapping[str, str] | None, *, is_playing: bool
    ) -> tuple[SnapshotHeader, int]:
        """Write or update the snapshot file of a session that is about to move; see
        `copy_exchange`.

        The other arguments are the same as for `save_session`. The caller must call `end_copy`
        afterwards.

        Returns:
            `(header, bytes)`: the file header, and the number of bytes written.

        Raises:
            RequestFailed: The session is unknown or could not be written.
        """
        exchange = copy_exchange(session_id, path, package_version(), owner, is_playing=is_playing)
        return await self._exchange(exchange, session_id)

    async def end_copy(self, path: Path) -> None:
        """Release the resources that the workers hold for a snapshot file written by
        `copy_session`.
        """
        await self._call_all_ranks("end_copy", (str(path),))

    async def update_session(
        self, session_id: str, path: Path
    ) -> tuple[SnapshotHeader, dict[str, Any]]:
        """Update a restored session from a later version of its snapshot file.

        The arguments and the result are the same as for `restore_session`.

        Raises:
            RequestFailed: The session could not be updated and has been closed.
        """
        rank = None if self._placement is None else self._placement.rank_of(session_id)
        return await self._exchange(update_exchange(session_id, path, rank), session_id)

    async def _exchange(self, exchange: Exchange[T], session_id: str) -> T:
        """Run a snapshot exchange for a live session with the workers of its data-parallel rank."""
        rank = None if self._placement is None else self._placement.rank_of(session_id)
        return await run_exchange_async(exchange, lambda call: self._call_workers(call, rank))

    async def restore_session(
        self, session_id: str, path: Path
    ) -> tuple[SnapshotHeader, dict[str, Any]]:
        """Restore a session from a snapshot file under a new id.

        Args:
            session_id: The engine's id for the restored session.
            path: Snapshot file.

        Returns:
            `(header, scalars)`: the snapshot's header and scalar values.

        Raises:
            RequestFailed: The id is in use (`session_exists`), or the snapshot could not be
                restored.
        """
        if self._placement is not None and self._placement.rank_of(session_id) is not None:
            raise RequestFailed("session_exists", "a session of this id is live here")
        rank = self._placement.adopt(session_id) if self._placement is not None else None
        try:
            exchange = restore_exchange(session_id, path, rank)
            return await run_exchange_async(exchange, lambda call: self._call_workers(call, rank))
        except BaseException:
            if self._placement is not None:
                self._placement.remove_session(session_id)
            raise

    async def _call_workers(self, call: WorkerCall, rank: int | None) -> list[dict[str, Any]]:
        """Call all workers on one data-parallel rank.

        The workers on all other data-parallel ranks also receive the call, but refuse or ignore it.
        """
        return (await self._call_all_ranks(call.method, call.args))[rank or 0]

    async def _rpc(self, method: str) -> list[dict[str, Any]]:
        """Call the first worker on every data-parallel rank, after the current engine step."""
        return [dict(responses[0]) for responses in await self._call_all_ranks(method)]

    async def _call_all_ranks(self, method: str, args: tuple[Any, ...] = ()) -> list[list[Any]]:
        """Call all workers on every data-parallel rank.

        Returns:
            A list with one entry per data-parallel rank. Each entry contains the results of that
            rank's workers.
        """
        try:
            if self._placement is None:
                return [await self._client.collective_rpc(method, args=args)]
            assert isinstance(self._client, AsyncLLM) and isinstance(
                self._client.engine_core, AsyncMPClient
            )
            # The stock `collective_rpc` calls every rank but returns only the first rank's result.
            core = self._client.engine_core
            responses: list[list[Any]] = await core.call_utility_all_async(
                "collective_rpc", method, None, args, None
            )
            return responses
        except EngineDeadError:
            raise RequestFailed("engine_dead", _DEAD) from None
        # Every exception that a worker raises arrives as a plain `Exception`, so catch all of them.
        except Exception as error:
            logger.debug("worker RPC %s failed", method, exc_info=True)
            raise RequestFailed(
                "engine_error", f"the worker did not respond to {method}"
            ) from error


def _log_chunk(meta: Mapping[str, Any], wall_s: float) -> None:
    """Log one line for a chunk.

    Args:
        meta: Metadata of the engine's result.
        wall_s: Time in seconds from request to result.
    """
    stages = " ".join(
        f"{name}={sum(times):.1f}" for name, times in meta.get("timings_ms", {}).items()
    )
    logger.debug(
        "chunk index=%s first_frame=%s frames=%s wall_ms=%.1f %s",
        *(
            meta["chunk_index"],
            meta.get("first_frame"),
            meta.get("num_frames"),
            wall_s * 1e3,
            stages,
        ),
    )
