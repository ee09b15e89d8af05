# SPDX-License-Identifier: Apache-2.0
"""The exchanges with an engine's workers: save a session to a file (at once, or beside its steps), make one of a file.

An exchange is a generator that yields calls and is sent every rank's answers, so that `LLM` (synchronous) and the doors
(asynchronous) share it. With an `LLM`:

    run_exchange(save_exchange("walk", path, package_version()), llm.collective_rpc)
    run_exchange(restore_exchange("walk", path), llm.collective_rpc)

Two calls save a session, because the file's layout needs every rank's sizes; a chunk that is finished between them is
noticed (`session_busy`). A checkpoint's bytes are copied together with its sizes and written while the engine goes on:
its exchange asks until they are. Held by tests/worker/test_snapshot_refusals.py,
tests/worker/test_session_checkpoints.py and tests/engine/test_session_snapshots.py.
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
from vllm_omni.sessions.snapshot import RankDescription, SnapshotHeader, StagedRank, read_header
from vllm_omni.sessions.snapshot_writing import create_file, plan

T = TypeVar("T")

_FIRST_LOOK_S: Final = 0.02
_LONGEST_LOOK_S: Final = 0.5


@dataclass(frozen=True)
class Call:
    """One RPC to all workers of an engine, in `after_s`; each answers `{"ok": ...}` or `{"error": [code, message]}`."""

    method: str
    args: tuple[Any, ...]
    after_s: float = 0.0


Exchange = Generator[Call, list[dict[str, Any]], T]


def save_exchange(
    session_id: str, path: Path, package_version: str, owner: Mapping[str, str] | None = None
) -> Exchange[SnapshotHeader]:
    """Write a session to the new file `path`; it stays as it is. Raises `RequestFailed`; then there is no file."""
    answers = _results((yield Call("describe_session", (session_id,))))
    planned = plan([msgspec.json.decode(answer, type=RankDescription) for answer in answers], package_version, owner)
    create_file(path, planned)
    try:
        place = (session_id, str(path), planned.header.chunk_index, planned.starts)
        _results((yield Call("write_session", place)))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return planned.header


def checkpoint_exchange(
    session_id: str, path: Path, package_version: str, owner: Mapping[str, str] | None = None
) -> Exchange[tuple[SnapshotHeader, float]]:
    """The same, while the engine goes on: `(header, cost_s)`. Raises `RequestFailed`; then there is no file.

    cost_s: the engine's time that it took, on the rank where it took most.
    """
    answers = _results((yield Call("stage_checkpoint", (session_id,))))
    staged = [msgspec.json.decode(answer, type=StagedRank) for answer in answers]
    planned = plan([rank.described for rank in staged], package_version, owner)
    create_file(path, planned)
    try:
        _results((yield Call("write_checkpoint", (session_id, str(path), planned.starts))))
        pause_s = _FIRST_LOOK_S
        while None in (spent_s := _results((yield Call("checkpoint_written", (session_id,), pause_s)))):
            pause_s = min(_LONGEST_LOOK_S, 2 * pause_s)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return planned.header, max(rank.held_s + spent for rank, spent in zip(staged, spent_s, strict=True))


def restore_exchange(
    session_id: str, path: Path, data_parallel_rank: int | None = None
) -> Exchange[tuple[SnapshotHeader, dict[str, Any]]]:
    """Make a session from a file, under a new id. Raises `RequestFailed`; then there is no session.

    Returns the header and the first rank's scalars. data_parallel_rank: the only engine that takes it; None = any.
    """
    header = read_header(path)
    try:
        _results((yield Call("restore_session", (session_id, str(path), data_parallel_rank))))
    except RequestFailed as failure:
        if failure.code != "session_exists":
            yield Call("close_session", (session_id,))  # on the ranks that took their part
        raise
    return header, header.ranks[0].scalars


def _results(answers: Sequence[dict[str, Any]]) -> list[Any]:
    for answer in answers:
        if "error" in answer:
            raise RequestFailed(*answer["error"])
    return [answer["ok"] for answer in answers]


def run_exchange(exchange: Exchange[T], rpc: Callable[..., list[dict[str, Any]]]) -> T:
    """Run an exchange over a synchronous `collective_rpc` (that of `LLM`)."""
    try:
        call = next(exchange)
        while True:
            try:
                time.sleep(call.after_s)
                answers = rpc(call.method, args=call.args)
            except Exception as error:  # the exchange cleans up, then it goes on
                call = exchange.throw(error)
            else:
                call = exchange.send(answers)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_exchange_async(exchange: Exchange[T], rpc: Callable[[Call], Awaitable[list[dict[str, Any]]]]) -> T:
    """The same for an engine client whose RPCs are awaited."""
    try:
        call = next(exchange)
        while True:
            try:
                if call.after_s:
                    await asyncio.sleep(call.after_s)
                answers = await rpc(call)
            except BaseException as error:
                call = exchange.throw(error)
            else:
                call = exchange.send(answers)
    except StopIteration as end:
        result: T = end.value
        return result


def package_version() -> str:
    try:
        return importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
