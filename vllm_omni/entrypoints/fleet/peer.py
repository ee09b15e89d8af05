# SPDX-License-Identifier: Apache-2.0
"""`Peer`: the HTTP calls that one server makes to move a session to another.

A move has two phases. `prepare` sends the snapshot. The target server restores the session but
hides it from clients, and discards it after a time limit. `commit` makes the session live. If the
reply to `commit` is lost, `end` requests the result and also prevents a later commit, so the reply
to `end` is final.
"""

import asyncio
import contextlib
import errno
import hashlib
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import aiohttp

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.fleet.servers import FleetServer
from vllm_omni.entrypoints.limits.access import MIGRATIONS_PATH, READY_PATH
from vllm_omni.entrypoints.snapshot_upload import PART_BYTES

RESOLVE_S: Final = 10.0
"""Time in seconds after a commit during which the source server may request the result. The target
server does not move the session to a third server within this time, so a refused connection proves
that the session has ended.
"""
_CONNECT_S: Final = 2.0
_COMMIT_S: Final = 2.0
_END_S: Final = 1.0
_READY_S: Final = 2.0
_RETRY_S: Final = 0.05
_PREPARE_S: Final = 10.0
_LEAST_BYTES_PER_S: Final = 50e6


class MoveResult(Enum):
    """Location of a session after a commit."""

    MOVED = "moved"
    """The session is only on the target server."""
    STAYED = "stayed"
    """The session is only on this server and will not appear on the target server."""
    UNKNOWN = "unknown"
    """The session may be on the target server."""


class Peer:
    """Client for the routes through which another server receives sessions.

    Args:
        client: This process's HTTP client.
        name: Name of the server.
        server: The server's addresses.
        key: The operator's key.
    """

    def __init__(
        self, client: aiohttp.ClientSession, name: str, server: FleetServer, key: str
    ) -> None:
        self._client, self.name, self._server = client, name, server
        self._headers = {"Authorization": f"Bearer {key}"}

    async def num_free(self) -> int:
        """Return the number of additional sessions that the server accepts; 0 if it is not ready or
        does not respond.
        """
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            async with self._client.get(
                self._url(READY_PATH), timeout=_limit(_READY_S)
            ) as response:
                ready = await response.json()
                if response.status == 200:
                    return max(1, (ready["max_sessions"] or 0) - (ready["sessions"] or 0))
        return 0

    async def prepare_shared(self, move_id: str, path: Path) -> None:
        """Make the server read a snapshot, or a later version of it, from the shared directory.

        Raises:
            EndpointError: `move_failed`, as for `prepare`.
        """
        limit_s = _PREPARE_S + path.stat().st_size / _LEAST_BYTES_PER_S
        status, reply = await self._call("PUT", f"{move_id}?shared={path.name}", limit_s)
        if status != 201:
            raise self._failed(_text(reply, status))

    async def prepare(self, move_id: str, path: Path) -> None:
        """Send a snapshot. The server restores it as a session that clients cannot use yet.

        Raises:
            EndpointError: `move_failed`. The server may still hold the session for some seconds.
        """
        digest = hashlib.sha256()
        num_bytes = path.stat().st_size
        status, reply = await self._call(
            "PUT",
            move_id,
            _PREPARE_S + num_bytes / _LEAST_BYTES_PER_S,
            data=_parts(path, digest),
            headers={"Content-Length": str(num_bytes)},
        )
        if status != 201:
            raise self._failed(_text(reply, status))
        if reply.get("sha256") != digest.hexdigest():
            raise self._failed("the snapshot was damaged on its way")

    async def commit(self, move_id: str, stream_state: bytes | None = None) -> MoveResult:
        """Make a prepared session live, and return where the session is afterwards.

        Args:
            move_id: Id of the move.
            stream_state: Controls for the session's live stream. None: the session has no live
                stream.

        This method returns within `RESOLVE_S` seconds.
        """
        with contextlib.suppress(EndpointError):
            path = f"{move_id}/commit"
            status, _ = await self._call("POST", path, _COMMIT_S, data=stream_state)
            if status == 200:
                return MoveResult.MOVED
        return await self.end_for_certain(move_id, RESOLVE_S - _COMMIT_S)

    async def end_for_certain(self, move_id: str, limit_s: float = RESOLVE_S) -> MoveResult:
        """Like `end`, but repeat the request until the server replies or the time limit expires.

        Args:
            move_id: Id of the move.
            limit_s: Time in seconds after which the result counts as unknown.
        """
        give_up_s = asyncio.get_running_loop().time() + limit_s
        while True:
            result = await self.end(move_id)
            if (
                result is not MoveResult.UNKNOWN
                or asyncio.get_running_loop().time() + _END_S >= give_up_s
            ):
                return result
            await asyncio.sleep(_RETRY_S)

    async def end(self, move_id: str) -> MoveResult:
        """End a move. If its session has been prepared but not committed, the session is discarded.
        Idempotent.
        """
        try:
            status, reply = await self._call("DELETE", move_id, _END_S)
        except EndpointError as error:
            cause = error.__cause__
            is_gone = isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED
            return MoveResult.STAYED if is_gone else MoveResult.UNKNOWN
        if status == 200:
            is_live = reply.get("state") == "committed"
            return MoveResult.MOVED if is_live else MoveResult.STAYED
        # A restarted server does not know the move and has no earlier sessions.
        is_new = status == 404 and _code(reply) == "unknown_migration"
        return MoveResult.STAYED if is_new else MoveResult.UNKNOWN

    async def _call(
        self, method: str, path: str, timeout_s: float, **options: Any
    ) -> tuple[int, dict[str, Any]]:
        headers = {**self._headers, **options.pop("headers", {})}
        try:
            async with self._client.request(
                method,
                self._url(f"{MIGRATIONS_PATH}/{path}"),
                headers=headers,
                timeout=_limit(timeout_s),
                allow_redirects=False,
                **options,
            ) as response:
                try:
                    reply = await response.json(content_type=None)
                except ValueError:
                    reply = None
                return response.status, reply if isinstance(reply, dict) else {}
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._failed("it does not respond") from error

    def _failed(self, reason: str) -> EndpointError:
        return EndpointError("move_failed", f"server {self.name!r}: {reason}")

    def _url(self, path: str) -> str:
        return self._server.url.rstrip("/") + path


def _limit(total_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_S)


async def _parts(path: Path, digest: "hashlib._Hash") -> AsyncIterator[bytes]:
    def read() -> bytes:
        part = file.read(PART_BYTES)
        digest.update(part)
        return part

    with path.open("rb") as file:
        while part := await asyncio.to_thread(read):
            yield part


def _code(reply: dict[str, Any]) -> str | None:
    error = reply.get("error")
    return error.get("code") if isinstance(error, dict) else None


def _text(reply: dict[str, Any], status: int) -> str:
    error = reply.get("error")
    text = error.get("message") if isinstance(error, dict) else None
    return f"{text or 'it refuses the session'} (HTTP {status})"
