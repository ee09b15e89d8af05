# SPDX-License-Identifier: Apache-2.0
"""Routes for operators, and for other servers that move sessions.

        GET    /omni/sessions                      the live sessions
        POST   /omni/sessions/{name}/migrate       move a session: {"to": name or URL}
        PUT    /omni/migrations/{id}               receive a snapshot from another server
        POST   /omni/migrations/{id}/commit        make the received session live
        DELETE /omni/migrations/{id}               end the move and return its result

All fleet routes require the operator's key (`VLLM_OMNI_OPERATOR_KEY`). If the server has no
operator key, the routes return 404.
"""

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vllm_omni.entrypoints.errors import (
    ApiError,
    EndpointError,
    invalid,
    not_found,
    respond_to_errors,
)
from vllm_omni.entrypoints.fleet.incoming import IncomingSessions
from vllm_omni.entrypoints.fleet.outgoing import SessionMover
from vllm_omni.entrypoints.fleet.servers import KEY_VARIABLE, Fleet
from vllm_omni.entrypoints.limits.access import MIGRATIONS_PATH, OPERATOR_SESSIONS_PATH
from vllm_omni.entrypoints.openai.body import read_body, read_bytes
from vllm_omni.entrypoints.openai.protocol import ErrorReply
from vllm_omni.entrypoints.realtime.controls.stream_state import MAX_STATE_BYTES
from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.server_context import ServerContext
from vllm_omni.entrypoints.snapshot_upload import max_snapshot_bytes, receive_snapshot
from vllm_omni.runtime import log_context

logger = logging.getLogger("vllm." + __name__)

_MAX_BODY_BYTES: Final = 64 << 10
_MAX_ID_CHARS: Final = 64


class LiveSessionReply(BaseModel):
    """A live session, as listed in `LiveSessionsReply`."""

    name: str
    """The client's id for the session."""
    principal: str
    """Digest of the client's API key, or `anonymous`."""
    next_chunk_index: int
    """Index of the session's next chunk."""
    is_busy: bool
    """Whether a request for the session is in progress."""
    idle_s: float
    """Seconds since the last request."""


class LiveSessionsReply(BaseModel):
    """Response body of `GET /omni/sessions`."""

    server: str | None
    """Name of this server (`omni.server_name`)."""
    sessions: list[LiveSessionReply]
    """Live sessions on this server that clients can use."""


class MigrateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /omni/sessions/{name}/migrate`."""

    to: str
    """Name or address of another server in the fleet file (`omni.fleet`)."""
    principal: str | None = None
    """Owner of the session. Required if several clients have a session with this name. Default: the
    only owner.
    """


class MigrateReply(BaseModel):
    """Response body of `POST /omni/sessions/{name}/migrate`."""

    name: str
    """The client's id for the session."""
    server: str
    """Name of the server on which the session continues."""
    next_chunk_index: int
    """Index of the session's next chunk."""
    bytes: int
    """Size of the snapshot in bytes."""
    pause_ms: float
    """Time in milliseconds from the start of the pause to the target server's confirmation of the
    move.
    """
    pause_bytes: int
    """Number of bytes copied during the pause, at most `bytes`."""


class FleetRoutes:
    """The fleet routes of one API server process."""

    def __init__(self) -> None:
        self.fleet = Fleet(None, {})
        self.migration: SessionMigration | None = None
        self._server_name: str | None = None
        self._max_bytes: int | None = None

    async def start_serving(self, server: ServerContext) -> None:
        """Read the list of servers, and register the drain step that moves sessions away.

        Raises:
            ValueError: The file or the key is invalid, or there are several API server processes.
        """
        self.fleet = Fleet.read(server.omni.fleet, server.omni.server_name)
        if self.fleet.key is not None and (server.args.api_server_count or 1) > 1:
            raise ValueError(
                f"{KEY_VARIABLE} requires --api-server-count 1, because a session belongs to one "
                f"process, got {server.args.api_server_count}"
            )
        self._server_name = server.omni.server_name
        self.migration = server.migration
        if self.migration is None or self.fleet.key is None:
            return
        self._max_bytes = await max_snapshot_bytes(server)
        self._leave_s = server.omni.drain_timeout_s / 2
        self._incoming = IncomingSessions(self.migration)
        self._mover = SessionMover(self.fleet, self.migration)
        server.sessions.drain.move_away = self._leave

    async def _leave(self) -> None:
        """Move this server's sessions to other servers. Half of the drain time is reserved for the
        sessions that remain on this server.
        """
        await self._incoming.wait_until_settled()
        if not self.fleet.others:
            return
        try:
            async with asyncio.timeout(self._leave_s):
                await self._mover.move_all()
        except TimeoutError:
            logger.warning("sessions are still here after %g s of moving", self._leave_s)

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        errors: dict[int | str, dict[str, Any]] = {
            "4XX": {"model": ErrorReply, "description": "The request was refused."},
            "5XX": {"model": ErrorReply, "description": "The move failed."},
        }
        sessions = {200: {"model": LiveSessionsReply, "description": "The live sessions."}}
        moved = {200: {"model": MigrateReply, "description": "The moved session."}}
        move = f"{MIGRATIONS_PATH}/{{move_id}}"
        for path, method, route, responses in (
            (OPERATOR_SESSIONS_PATH, "GET", self._list, sessions),
            (f"{OPERATOR_SESSIONS_PATH}/{{name}}/migrate", "POST", self._migrate, moved),
            (move, "PUT", self._prepare, {}),
            (f"{move}/commit", "POST", self._commit, {}),
            (move, "DELETE", self._end, {}),
        ):
            settings: dict[str, Any] = {
                "response_class": Response,
                "response_model": None,
                "tags": ["omni"],
                "responses": {**errors, **responses},
                "include_in_schema": bool(responses),
            }
            app.add_api_route(path, route, methods=[method], **settings)
        return ()

    def _check_operator(self, request: Request) -> SessionMigration:
        """Check the operator's key.

        Raises:
            ApiError: Status 401 if the key is wrong, or 404 if the server has no operator key or
                the model has no sessions.
        """
        if self.fleet.key is None or self.migration is None:
            raise not_found(f"set {KEY_VARIABLE} and serve a model with sessions")
        if not self.fleet.is_operator(request.headers.get("authorization", "")):
            raise ApiError(401, "the operator's key is required", code="unauthorized")
        return self.migration

    @respond_to_errors
    async def _list(self, request: Request) -> Response:
        """List the live sessions."""
        migration = self._check_operator(request)
        rows = [
            LiveSessionReply(
                name=session.session_id,
                principal=session.key[0],
                next_chunk_index=session.next_chunk,
                is_busy=session.is_busy,
                idle_s=round(session.idle_s, 3),
            )
            for session in migration.manager.sessions()
            if session.started
        ]
        return JSONResponse(
            LiveSessionsReply(server=self._server_name, sessions=rows).model_dump(),
            headers={"Cache-Control": "no-store"},
        )

    @respond_to_errors
    async def _migrate(self, request: Request, name: str) -> Response:
        """Move a session to another server before its next chunk."""
        migration = self._check_operator(request)
        fields = (await read_body(request, _MAX_BODY_BYTES)).fields
        try:
            body = msgspec.convert(fields, MigrateBody)
        except msgspec.ValidationError as error:
            raise invalid(str(error)) from None
        found = self.fleet.find(body.to)
        if found is None:
            raise EndpointError(
                "unknown_server",
                f"omni.fleet of this server lists {sorted(self.fleet.others)} besides itself",
                param="to",
            )
        session = _find_session(migration, name, body.principal)
        log_context.bind(session_id=name)
        started_s = time.monotonic()
        moved = await self._mover.move(session, *found)
        logger.debug("migrate took %.3f s with the chunk before", time.monotonic() - started_s)
        reply = MigrateReply(
            name=name,
            server=moved.destination.server,
            next_chunk_index=moved.destination.next_chunk_index,
            bytes=moved.num_bytes,
            pause_ms=round(moved.pause_s * 1e3, 3),
            pause_bytes=moved.pause_bytes,
        )
        return JSONResponse(reply.model_dump())

    @respond_to_errors
    async def _prepare(self, request: Request, move_id: str) -> Response:
        """Restore a snapshot without making the session live."""
        migration = self._check_operator(request)
        if len(move_id) > _MAX_ID_CHARS:
            raise invalid("the id of the move is too long", "move_id")
        migration.manager.drain.check_new()
        if (shared := request.query_params.get("shared")) is not None:
            return await self._prepare_shared(move_id, shared)
        self._incoming.begin(move_id)
        path = migration.staging.new_path()
        try:
            sha256 = await receive_snapshot(request, path, self._max_bytes)
            session = await self._incoming.prepare(move_id, path)
        except BaseException:
            self._incoming.end(move_id)
            path.unlink(missing_ok=True)
            raise
        return JSONResponse(
            {"state": "prepared", "sha256": sha256, "next_chunk_index": session.next_chunk}, 201
        )

    async def _prepare_shared(self, move_id: str, name: str) -> Response:
        """Restore a session from the shared directory, or apply a later version of its snapshot."""
        if self.fleet.shared_dir is None or re.fullmatch(r"\w[\w.-]{0,127}", name) is None:
            raise invalid("this server has no such shared snapshot", "shared")
        path = Path(self.fleet.shared_dir) / name
        session = await self._incoming.prepare_shared(move_id, path)
        return JSONResponse({"state": "prepared", "next_chunk_index": session.next_chunk}, 201)

    @respond_to_errors
    async def _commit(self, request: Request, move_id: str) -> Response:
        """Make a prepared session live."""
        self._check_operator(request)
        stream_state = await read_bytes(request, MAX_STATE_BYTES)
        session = self._incoming.commit(move_id, stream_state or None)
        return JSONResponse({"state": "committed", "next_chunk_index": session.next_chunk})

    @respond_to_errors
    async def _end(self, request: Request, move_id: str) -> Response:
        """End a move and return its result."""
        self._check_operator(request)
        return JSONResponse({"state": self._incoming.end(move_id)})


def _find_session(migration: SessionMigration, name: str, principal: str | None) -> Session:
    found = [
        session
        for session in migration.manager.sessions()
        if session.session_id == name and principal in (None, session.key[0])
    ]
    if len(found) > 1:
        raise invalid(f"{len(found)} clients use this name; name the principal", "principal")
    if not found:
        raise not_found("the server has no such session", "name", "unknown_session")
    return found[0]
