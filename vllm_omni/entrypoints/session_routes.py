# SPDX-License-Identifier: Apache-2.0
"""`/v1/sessions`: save live sessions to files and restore them.

        GET    /v1/sessions/{session_id}/snapshot   the session as of its last finished chunk
        PUT    /v1/sessions/{session_id}            restore the snapshot in the body under this id
        POST   /v1/sessions                         restore it under an id that the server chooses
        DELETE /v1/sessions/{session_id}            close the session

As with the WebSocket endpoints, a session belongs to the API key that created it. Request bodies
are streamed to a file and never held in memory.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from vllm_omni.entrypoints.errors import EndpointError, not_found, respond_to_errors
from vllm_omni.entrypoints.limits.access import SESSIONS_PATH
from vllm_omni.entrypoints.openai.protocol import ErrorReply
from vllm_omni.entrypoints.realtime.connection.connection import (
    client_of,
    principal_of,
    transport_of,
)
from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration
from vllm_omni.entrypoints.realtime.sessions.session import Session, new_session_id
from vllm_omni.entrypoints.realtime.sessions.session_host import SessionKey
from vllm_omni.entrypoints.server_context import ServerContext
from vllm_omni.entrypoints.snapshot_upload import (
    PART_BYTES,
    max_snapshot_bytes,
    receive_snapshot,
)
from vllm_omni.entrypoints.staging_directory import StagingDirectory
from vllm_omni.inputs import SessionId
from vllm_omni.runtime import log_context

logger = logging.getLogger("vllm." + __name__)

MEDIA_TYPE: Final = "application/octet-stream"
_ENDPOINT: Final = "sessions"
_EXCHANGES: Final = 2
"""Maximum number of snapshots that the engine writes or reads at the same time. Additional
snapshots wait.
"""
_UPLOADS: Final = 8
"""Maximum number of concurrent uploads. Each upload may be as large as a session."""
_UPLOADS_PER_CLIENT: Final = 2
_SENT_BYTES: Final = 64 << 10
"""Number of bytes that a client must receive within the send deadline. With the default deadline,
this limit corresponds to 22 KB/s.
"""
_BINARY: Final = {MEDIA_TYPE: {"schema": {"type": "string", "contentMediaType": MEDIA_TYPE}}}


class SessionReply(BaseModel):
    """Response body that describes a restored session."""

    id: str
    """Session id."""
    object: str = "session"
    """Object type."""
    next_chunk_index: int
    """Index of the session's next chunk."""
    width: int
    """Frame width in pixels."""
    height: int
    """Frame height in pixels."""
    prompt: str | None
    """Current prompt."""
    seed: int | None
    """The session's seed."""


class SessionRoutes:
    """The `/v1/sessions` routes in one API server process. If the model has no sessions, every
    route returns 404.
    """

    def __init__(self) -> None:
        self._migration: SessionMigration | None = None
        self._max_bytes: int | None = None
        """Maximum size of a snapshot in bytes. None: no limit."""
        self._exchanges = asyncio.Semaphore(_EXCHANGES)
        self._uploads: Counter[str] = Counter()

    async def start_serving(self, server: ServerContext) -> None:
        """Connect the routes to the sessions, and restore stopped servers' sessions."""
        if not server.is_world:
            return
        omni = server.omni
        staging = StagingDirectory(Path(omni.snapshot_dir or tempfile.gettempdir()))
        persistent_dir = None if omni.drain_snapshot_dir is None else Path(omni.drain_snapshot_dir)
        migration = SessionMigration(
            server.sessions, staging, persistent_dir, omni.snapshot_period_s
        )
        self._max_bytes = await max_snapshot_bytes(server)
        server.migration = migration
        self._migration = migration
        await asyncio.to_thread(migration.sweep)
        if count := await migration.take_over():
            logger.info("sessions_taken_over count=%d", count)

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        body = {"requestBody": {"required": True, "content": _BINARY}}
        errors: dict[int | str, dict[str, Any]] = {
            "4XX": {"model": ErrorReply, "description": "The request was refused."},
            "5XX": {"model": ErrorReply, "description": "The server failed."},
        }
        created = {**errors, 201: {"model": SessionReply, "description": "The restored session."}}
        snapshot = {**errors, 200: {"content": _BINARY, "description": "The snapshot."}}
        for path, method, route, extra in (
            (
                SESSIONS_PATH,
                "POST",
                self._create,
                {"openapi_extra": body, "responses": created, "status_code": 201},
            ),
            (
                f"{SESSIONS_PATH}/{{session_id}}",
                "PUT",
                self._put,
                {"openapi_extra": body, "responses": created, "status_code": 201},
            ),
            (
                f"{SESSIONS_PATH}/{{session_id}}",
                "DELETE",
                self._delete,
                {"responses": errors, "status_code": 204},
            ),
            (
                f"{SESSIONS_PATH}/{{session_id}}/snapshot",
                "GET",
                self._snapshot,
                {"responses": snapshot},
            ),
        ):
            settings: dict[str, Any] = {
                "response_class": Response,
                "response_model": None,
                "tags": ["omni"],
                **extra,
            }
            app.add_api_route(path, route, methods=[method], **settings)
        return ()

    @property
    def migration(self) -> SessionMigration:
        if self._migration is None:
            raise not_found("the served model has no sessions")
        return self._migration

    @respond_to_errors
    async def _snapshot(self, request: Request, session_id: str) -> Response:
        """Download a snapshot of a session's state as of its last finished chunk."""
        session = self._known(request, session_id)
        path = self._new_path()
        try:
            async with self._exchanges:
                header = await self.migration.save(session, path)
            file = await asyncio.to_thread(path.open, "rb")
        finally:
            path.unlink(missing_ok=True)  # the open file stays readable until the response ends
        headers = {
            "Content-Length": str(os.fstat(file.fileno()).st_size),
            "Content-Disposition": "attachment; "
            f'filename="{session_id.replace(":", "_")}.session.safetensors"',
            "X-Next-Chunk-Index": str(header.chunk_index),
        }
        deadline_s = self.migration.manager.limits.send_deadline_s
        return FileDownload(file, deadline_s, media_type=MEDIA_TYPE, headers=headers)

    @respond_to_errors
    async def _create(self, request: Request) -> Response:
        """Restore a session under an id that the server chooses."""
        return await self._restore(request, new_session_id(self.migration.manager.server_name))

    @respond_to_errors
    async def _put(self, request: Request, session_id: str) -> Response:
        """Restore a session under the given id, which must not be in use."""
        return await self._restore(request, _checked(session_id))

    @respond_to_errors
    async def _delete(self, request: Request, session_id: str) -> Response:
        """Close a session and cancel its requests."""
        await self._known(request, session_id).reset()
        return Response(status_code=204)

    async def _restore(self, request: Request, session_id: str) -> Response:
        migration, key = self.migration, _key(request, session_id)
        client = client_of(request)
        if migration.manager.find(key) is not None:  # checked before the body is read
            raise EndpointError(
                "session_exists",
                "a session with this id is live; choose another",
                param="session_id",
            )
        migration.manager.drain.check()
        path = self._new_path()
        try:
            with self._upload(client):
                await receive_snapshot(request, path, self._max_bytes)
            async with self._exchanges:
                session = await migration.restore(key, client, path, _ENDPOINT)
        finally:
            path.unlink(missing_ok=True)
        return JSONResponse(_reply(session).model_dump(), 201)

    @contextlib.contextmanager
    def _upload(self, client: str) -> Iterator[None]:
        if self._uploads[client] >= _UPLOADS_PER_CLIENT:
            raise EndpointError(
                "busy",
                f"{_UPLOADS_PER_CLIENT} of your snapshots are being uploaded; try again later",
            )
        if self._uploads.total() >= _UPLOADS:
            raise EndpointError("busy", f"{_UPLOADS} snapshots are being uploaded; try again later")
        self._uploads[client] += 1
        try:
            yield
        finally:
            self._uploads[client] -= 1
            self._uploads += Counter()  # remove clients whose count is zero

    def _known(self, request: Request, session_id: str) -> Session:
        key = _key(request, _checked(session_id))
        session = self.migration.manager.find(key)
        if session is None:
            self.migration.manager.check_moved(key)
            raise not_found(
                "the server has no such session", param="session_id", code="unknown_session"
            )
        return session

    def _new_path(self) -> Path:
        return self.migration.staging.new_path()


def _checked(session_id: str) -> str:
    try:
        return msgspec.convert(session_id, Annotated[str, *SessionId.__metadata__])  # type: ignore[attr-defined]
    except msgspec.ValidationError:
        raise not_found(
            "the id of the session is invalid", param="session_id", code="unknown_session"
        ) from None


def _key(request: Request, session_id: str) -> SessionKey:
    log_context.bind(session_id=session_id)
    return principal_of(request), session_id


def _reply(session: Session) -> SessionReply:
    return SessionReply(
        id=session.session_id,
        next_chunk_index=session.next_chunk,
        width=session.width,
        height=session.height,
        prompt=session.prompt,
        seed=session.seed,
    )


class FileDownload(Response):
    """Response that streams a file.

    A client that receives less than 64 KiB within the send deadline is disconnected.
    """

    def __init__(self, file: BinaryIO, deadline_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._file, self._deadline_s = file, deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file as file:
            try:
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                while part := await asyncio.to_thread(file.read, PART_BYTES):
                    for start in range(0, len(part), _SENT_BYTES):
                        body = part[start : start + _SENT_BYTES]
                        async with asyncio.timeout(self._deadline_s):
                            await send(
                                {"type": "http.response.body", "body": body, "more_body": True}
                            )
                await send({"type": "http.response.body", "body": b""})
            except TimeoutError:
                logger.info(
                    "snapshot_download_cut: the client did not read for %g s", self._deadline_s
                )
                if (transport := transport_of(Request(scope))) is not None:
                    transport.abort()
                    while (await receive())["type"] != "http.disconnect":
                        pass
