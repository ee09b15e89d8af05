# SPDX-License-Identifier: Apache-2.0
"""Exchanges of messages with an engine's workers, to save a session to a file or restore a session
from a file.

An exchange is a generator that yields calls and receives the results of all ranks, so `LLM`
(synchronous) and the endpoints (asynchronous) can share the code. With an `LLM`:

    run_exchange(save_exchange("walk", path, package_version()), llm.collective_rpc)
    run_exchange(restore_exchange("walk", path), llm.collective_rpc)

Saving takes two calls, because the layout of the file depends on the sizes of the tensors on all
ranks. If a chunk finishes between the two calls, saving fails with `session_busy`. For a periodic
snapshot, each rank copies its tensors in the same call that returns their sizes, and writes the
copy while the engine continues. The exchange then polls until the file has been written.
"""

import asyncio
import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import (
    RankDescription,
    SnapshotHeader,
    StagedRank,
    read_header,
)
from vllm_omni.session_files.snapshot_writing import HEAD_BYTES, create_file, plan
from vllm_worlds import DISTRIBUTION

T = TypeVar("T")

_FIRST_LOOK_S: Final = 0.02
_LONGEST_LOOK_S: Final = 0.5


@dataclass(frozen=True)
class WorkerCall:
    """One RPC to all workers of an engine.

    Each worker returns `{"ok": ...}` or `{"error": [code, message]}`.
    """

    method: str
    """Name of the worker's method."""
    args: tuple[Any, ...]
    """Arguments of the method."""
    after_s: float = 0.0
    """Time in seconds to wait before the call."""


Exchange = Generator[WorkerCall, list[dict[str, Any]], T]


def save_exchange(
    session_id: str, path: Path, package_version: str, owner: Mapping[str, str] | None = None
) -> Exchange[SnapshotHeader]:
    """Write a session to a new file. The session is not changed.

    Args:
        session_id: Id of the session to save.
        path: Path of the new file. If the exchange fails, the file is removed.
        package_version: Version of this package.
        owner: Owner of the session; see `SnapshotHeader.owner`.

    Returns:
        The header of the file.

    Raises:
        RequestFailed: The session could not be saved.
    """
    responses = _results((yield WorkerCall("describe_session", (session_id,))))
    planned = plan(
        [msgspec.json.decode(response, type=RankDescription) for response in responses],
        package_version,
        owner,
    )
    create_file(path, planned)
    try:
        position = (session_id, str(path), planned.header.chunk_index, planned.starts)
        _results((yield WorkerCall("write_session", position)))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return planned.header


def live_save_exchange(
    session_id: str, path: Path, package_version: str, owner: Mapping[str, str] | None = None
) -> Exchange[tuple[SnapshotHeader, float]]:
    """Write a session to a new file while the engine continues. The arguments are those of
    `save_exchange`.

    Returns:
        The header of the file, and the engine time in seconds that the snapshot took on the slowest
        rank.
    """
    responses = _results((yield WorkerCall("stage_snapshot", (session_id,))))
    staged = [msgspec.json.decode(response, type=StagedRank) for response in responses]
    planned = plan([rank.described for rank in staged], package_version, owner)
    create_file(path, planned)
    try:
        _results((yield WorkerCall("write_snapshot", (session_id, str(path), planned.starts))))
        spent_s = yield from _poll("snapshot_written", session_id)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return planned.header, max(
        rank.held_s + spent for rank, spent in zip(staged, spent_s, strict=True)
    )


def copy_exchange(
    session_id: str,
    path: Path,
    package_version: str,
    owner: Mapping[str, str] | None = None,
    *,
    is_playing: bool,
) -> Exchange[tuple[SnapshotHeader, int]]:
    """Write a session to a file, or update the file from an earlier call.

    Args:
        session_id: Id of the session.
        path: Path of the file. If the exchange fails, the file is removed, unless the error is
            `session_busy`.
        package_version: Version of this package.
        owner: Owner of the session; see `SnapshotHeader.owner`.
        is_playing: Whether to write while the engine continues. A session can be resumed only from
            a file whose last version was written with `is_playing` false.

    Returns:
        The header of the file, and the number of bytes written.

    Raises:
        RequestFailed: The session could not be saved.
    """
    try:
        responses = _results((yield WorkerCall("describe_copy", (session_id, str(path)))))
        described = [msgspec.json.decode(response, type=RankDescription) for response in responses]
        planned = plan(described, package_version, owner, HEAD_BYTES, is_complete=not is_playing)
        create_file(path, planned, is_update=path.exists())
        position = (session_id, str(path), planned.header.chunk_index, planned.starts, is_playing)
        _results((yield WorkerCall("write_copy", position)))
        num_bytes = yield from _poll("copy_written", str(path))
    except RequestFailed as failure:
        if failure.code != "session_busy":
            path.unlink(missing_ok=True)
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return planned.header, sum(num_bytes)


def _poll(method: str, name: str) -> Exchange[list[Any]]:
    """Call a worker method repeatedly until no worker returns None."""
    pause_s = 0.0
    while None in (results := _results((yield WorkerCall(method, (name,), pause_s)))):
        pause_s = min(_LONGEST_LOOK_S, max(_FIRST_LOOK_S, 2 * pause_s))
    return results


def update_exchange(
    session_id: str, path: Path, data_parallel_rank: int | None = None
) -> Exchange[tuple[SnapshotHeader, dict[str, Any]]]:
    """Update a restored session from a later version of its file.

    The arguments and the result are those of `restore_exchange`. If the exchange fails, the session
    is closed.
    """
    header = read_header(path)
    call = WorkerCall("update_session", (session_id, str(path), data_parallel_rank))
    try:
        _results((yield call))
    except RequestFailed:
        yield WorkerCall("close_session", (session_id,))
        raise
    return header, header.ranks[0].scalars


def restore_exchange(
    session_id: str, path: Path, data_parallel_rank: int | None = None
) -> Exchange[tuple[SnapshotHeader, dict[str, Any]]]:
    """Create a session from a file.

    Args:
        session_id: Id of the new session. If the exchange fails, there is no session with this id.
        path: Path of the snapshot file.
        data_parallel_rank: Data-parallel rank that restores the session, or None if all ranks
            restore it.

    Returns:
        The header of the file, and the scalars of the first rank.

    Raises:
        RequestFailed: The session could not be restored.
    """
    header = read_header(path)
    try:
        _results((yield WorkerCall("restore_session", (session_id, str(path), data_parallel_rank))))
    except RequestFailed as failure:
        if failure.code != "session_exists":
            yield WorkerCall(
                "close_session", (session_id,)
            )  # closes it on the ranks that have restored their part
        raise
    return header, header.ranks[0].scalars


def _results(responses: Sequence[dict[str, Any]]) -> list[Any]:
    for response in responses:
        if "error" in response:
            raise RequestFailed(*response["error"])
    return [response["ok"] for response in responses]


def run_exchange(exchange: Exchange[T], rpc: Callable[..., list[dict[str, Any]]]) -> T:
    """Run an exchange over a synchronous `collective_rpc`, for example `LLM.collective_rpc`."""
    try:
        call = next(exchange)
        while True:
            try:
                time.sleep(call.after_s)
                responses = rpc(call.method, args=call.args)
            except Exception as error:  # passed to the exchange, which cleans up and may continue
                call = exchange.throw(error)
            else:
                call = exchange.send(responses)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_exchange_async(
    exchange: Exchange[T], rpc: Callable[[WorkerCall], Awaitable[list[dict[str, Any]]]]
) -> T:
    """Run an exchange over an asynchronous RPC."""
    try:
        call = next(exchange)
        while True:
            try:
                if call.after_s:
                    await asyncio.sleep(call.after_s)
                responses = await rpc(call)
            except BaseException as error:
                call = exchange.throw(error)
            else:
                call = exchange.send(responses)
    except StopIteration as end:
        result: T = end.value
        return result


def package_version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
