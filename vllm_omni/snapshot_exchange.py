# SPDX-License-Identifier: Apache-2.0
"""The two exchanges with an engine's workers: save a session to a file, make a session of one.

An exchange is a generator that yields calls and is sent every rank's answers, so that `LLM` (synchronous) and the doors
(asynchronous) share it. With an `LLM`:

    run_exchange(save_exchange("walk", path, package_version()), llm.collective_rpc)
    run_exchange(restore_exchange("walk", path), llm.collective_rpc)

Two calls save a session, because the file's layout needs every rank's sizes; a chunk that is finished between them is
noticed (`session_busy`). Held by tests/worker/test_snapshot_refusals.py and tests/engine/test_session_snapshots.py.
"""

import importlib.metadata
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vllm_omni.outputs import RequestFailed
from vllm_omni.snapshot import RankDescription, SnapshotHeader, read_header
from vllm_omni.snapshot_writing import create_file, plan

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One RPC to all workers of an engine; each answers `{"ok": ...}` or `{"error": [code, message]}`."""

    method: str
    args: tuple[Any, ...]


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
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            call = exchange.send(answer) if failure is None else exchange.throw(failure)
        except StopIteration as end:
            result: T = end.value
            return result
        answer, failure = None, None
        try:
            answer = rpc(call.method, args=call.args)
        except Exception as error:  # the exchange cleans up, then it goes on
            failure = error


async def run_exchange_async(exchange: Exchange[T], rpc: Callable[[Call], Awaitable[list[dict[str, Any]]]]) -> T:
    """The same for an engine client whose RPCs are awaited."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            call = exchange.send(answer) if failure is None else exchange.throw(failure)
        except StopIteration as end:
            result: T = end.value
            return result
        answer, failure = None, None
        try:
            answer = await rpc(call)
        except BaseException as error:
            failure = error


def package_version() -> str:
    try:
        return importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
