# SPDX-License-Identifier: Apache-2.0
"""`/v1/environments`: worlds as gymnasium environments over HTTP.

        GET    /v1/environments              spaces and limits
        POST   /v1/environments              create environments
        POST   /v1/environments/{id}/reset   start episodes; replies with their first chunks
        POST   /v1/environments/{id}/step    one chunk of each named environment
        POST   /v1/environments/{id}/fork    copy an environment to others
        DELETE /v1/environments/{id}         close the environments

Environments belong to the API key that created them. The protocol uses HTTP instead of a WebSocket
for two reasons. First, generating a step's chunk takes much longer than sending an HTTP request
over an established connection, so the overhead of HTTP is negligible. Second, HTTP requests are
subject to the same keys, quotas, limits and proxies as the other routes.
"""

import io
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec
import torch
from fastapi import FastAPI, Request
from starlette.responses import Response

from vllm_omni.entrypoints.environments.protocol import (
    PATH,
    ChunkEntry,
    ChunksReply,
    CreateReply,
    CreateRequest,
    EnvironmentSpec,
    ForkRequest,
    ResetRequest,
    StepRequest,
)
from vllm_omni.entrypoints.environments.table import (
    ChunkArrays,
    EnvironmentGroup,
    EnvironmentTable,
)
from vllm_omni.entrypoints.errors import (
    ApiError,
    EndpointError,
    invalid,
    not_found,
    respond_to_errors,
)
from vllm_omni.entrypoints.openai.body import read_body
from vllm_omni.entrypoints.openai.protocol import ErrorReply
from vllm_omni.entrypoints.realtime.connection.connection import client_of, principal_of
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.server_context import ServerContext
from vllm_omni.entrypoints.session_routes import MEDIA_TYPE, FileDownload
from vllm_omni.outputs import pack

_MAX_BODY_BYTES: Final = 1 << 20
"""Maximum size in bytes of a request body without images."""

T = TypeVar("T")


class EnvironmentRoutes:
    """The environment routes of one API server process. If the model has no sessions, every route
    returns 404.
    """

    def __init__(self) -> None:
        self._known: EnvironmentTable | None = None

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        errors: dict[int | str, dict[str, Any]] = {
            "4XX": {"model": ErrorReply, "description": "The request was refused."},
            "5XX": {"model": ErrorReply, "description": "The server failed."},
        }
        arrays: dict[int | str, dict[str, Any]] = {
            200: {"content": {MEDIA_TYPE: {}}, "description": "A result envelope."}
        }
        one = f"{PATH}/{{group_id}}"
        for path, method, route, status, replies in (
            (PATH, "GET", self._describe, 200, {}),
            (PATH, "POST", self._create, 201, {}),
            (f"{one}/reset", "POST", self._reset, 200, arrays),
            (f"{one}/step", "POST", self._step, 200, arrays),
            (f"{one}/fork", "POST", self._fork, 204, {}),
            (one, "DELETE", self._delete, 204, {}),
        ):
            json_body = {"requestBody": {"required": True, "content": {"application/json": {}}}}
            app.add_api_route(
                path,
                route,
                methods=[method],
                status_code=status,
                responses={**errors, **replies},
                response_class=Response,
                response_model=None,
                openapi_extra=json_body if method == "POST" else None,
                tags=["omni"],
            )
        return ()

    async def start_serving(self, server: ServerContext) -> None:
        if server.is_world:
            self.serve(server.sessions)

    def serve(self, manager: SessionManager) -> None:
        """Start serving environments, whose sessions belong to the given manager."""
        self._known = EnvironmentTable(manager)

    @property
    def _table(self) -> EnvironmentTable:
        if self._known is None:
            raise not_found("the served model has no sessions, so it has no environments")
        return self._known

    @respond_to_errors
    async def _describe(self, request: Request) -> Response:
        """Return the spaces and limits of the served world."""
        return _json(EnvironmentSpec.of(self._table.manager.info))

    @respond_to_errors
    async def _create(self, request: Request) -> Response:
        """Create environments."""
        table, manager = self._table, self._table.manager
        # The start image and the named images are base64-encoded.
        max_bytes = 3 * manager.limits.max_image_bytes + _MAX_BODY_BYTES
        body = await _read(request, CreateRequest, max_bytes)
        group = await table.create(principal_of(request), client_of(request), body)
        spec = EnvironmentSpec.of(manager.info)
        return _json(CreateReply(id=group.id, num_envs=body.num_envs, spec=spec), 201)

    @respond_to_errors
    async def _reset(self, request: Request, group_id: str) -> Response:
        """Start a new episode in each listed environment."""
        group = self._find(request, group_id)
        entries = (await _read(request, ResetRequest)).episodes
        results = await group.reset(entries)
        return await self._reply([entry.environment for entry in entries], results)

    @respond_to_errors
    async def _step(self, request: Request, group_id: str) -> Response:
        """Generate the next chunk in each listed environment."""
        group = self._find(request, group_id)
        entries = (await _read(request, StepRequest)).steps
        results = await group.step(entries)
        return await self._reply([entry.environment for entry in entries], results)

    @respond_to_errors
    async def _fork(self, request: Request, group_id: str) -> Response:
        """Replace environments with copies of another environment."""
        group, body = self._find(request, group_id), await _read(request, ForkRequest)
        await group.fork(body.source, body.targets)
        return Response(status_code=204)

    @respond_to_errors
    async def _delete(self, request: Request, group_id: str) -> Response:
        """Close all environments in a group."""
        await self._table.close(self._find(request, group_id))
        return Response(status_code=204)

    def _find(self, request: Request, group_id: str) -> EnvironmentGroup:
        return self._table.find(principal_of(request), group_id)

    async def _reply(
        self, environments: Sequence[int], results: Sequence[ChunkArrays | EndpointError]
    ) -> Response:
        """Return a response with the chunks generated by a reset or a step.

        Raises:
            EndpointError: All environments failed.
        """
        failures = [result for result in results if isinstance(result, EndpointError)]
        if len(failures) == len(results):
            raise failures[0]
        manager = self._table.manager
        body: bytes = await manager.off_loop(_packed, environments, results)
        return FileDownload(
            io.BytesIO(body),
            manager.limits.send_deadline_s,
            media_type=MEDIA_TYPE,
            headers={"Content-Length": str(len(body))},
        )


def _packed(environments: Sequence[int], results: Sequence[ChunkArrays | EndpointError]) -> bytes:
    entries, tensors = [], {}
    for environment, result in zip(environments, results, strict=True):
        if isinstance(result, EndpointError):
            error = {"code": result.code, "message": result.message}
            entries.append(ChunkEntry(environment=environment, error=error))
            continue
        entries.append(msgspec.structs.replace(result.entry, environment=environment))
        for kind, array in result.arrays.items():
            tensors[f"{kind}.{environment}"] = torch.from_numpy(array)
    meta = msgspec.to_builtins(ChunksReply(chunks=entries))
    return pack(meta, tensors).numpy().tobytes()


async def _read(request: Request, kind: type[T], max_bytes: int = _MAX_BODY_BYTES) -> T:
    """Read and decode a request body.

    Raises:
        ApiError: The body is invalid or too large.
    """
    body = await read_body(request, max_bytes)
    if body.is_form:
        raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
    try:
        return msgspec.convert(body.fields, kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None


def _json(message: msgspec.Struct, status: int = 200) -> Response:
    content = msgspec.json.encode(message)
    return Response(content, status, media_type="application/json")
