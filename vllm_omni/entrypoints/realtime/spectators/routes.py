# SPDX-License-Identifier: Apache-2.0
"""Spectators of live sessions.

        POST /v1/sessions/{session_id}/spectators   create a spectator token (owner only)
        WebSocket /omni/watch                       watch the token's session

`/omni/watch` requires no API key because the token grants read-only access to only one session.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.errors import not_found, respond_to_errors
from vllm_omni.entrypoints.limits.access import SESSIONS_PATH
from vllm_omni.entrypoints.openai.protocol import ErrorReply
from vllm_omni.entrypoints.realtime.connection.connection import principal_of
from vllm_omni.entrypoints.realtime.connection.live_client import RealtimeEndpoint
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.spectators.handler import WatchClient
from vllm_omni.entrypoints.realtime.spectators.tokens import SpectatorTokens
from vllm_omni.inputs import SessionId

if TYPE_CHECKING:
    from vllm_omni.entrypoints.server_context import ServerContext

WATCH_PATH: Final = "/omni/watch"
_DEFAULT_LIFETIME_S: Final = 3600
_MAX_LIFETIME_S: Final = 86_400


class SpectatorReply(BaseModel):
    """Response body that contains a spectator token."""

    object: str = "spectator_token"
    """Object type."""
    token: str
    """Token that admits any number of spectators until it expires."""
    expires_in_s: int
    """Time in seconds until the token expires. The expiry does not disconnect spectators that have
    already joined.
    """


class SpectatorRoutes:
    """The spectator endpoint of one API server process. If the model has no sessions, every path
    returns 404.
    """

    def __init__(self) -> None:
        self._manager: SessionManager | None = None
        self._watch: RealtimeEndpoint | None = None
        self._tokens = SpectatorTokens()

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        responses: dict[int | str, dict[str, Any]] = {
            201: {"model": SpectatorReply, "description": "The token."},
            "4XX": {"model": ErrorReply, "description": "The request was refused."},
            "5XX": {"model": ErrorReply, "description": "The server failed."},
        }
        app.add_api_route(
            f"{SESSIONS_PATH}/{{session_id}}/spectators",
            self._create,
            methods=["POST"],
            status_code=201,
            responses=responses,
            response_class=Response,
            response_model=None,
            tags=["omni"],
        )
        app.add_api_websocket_route(WATCH_PATH, self._serve)
        return (WATCH_PATH,)

    async def start_serving(self, server: "ServerContext") -> None:
        if server.is_world:
            self.serve(server.sessions)

    def serve(self, manager: SessionManager) -> None:
        """Start serving spectators of the given manager's sessions."""
        self._manager = manager
        self._watch = RealtimeEndpoint(manager, partial(WatchClient, tokens=self._tokens))

    @respond_to_errors
    async def _create(
        self,
        request: Request,
        session_id: SessionId,
        expires_in_s: Annotated[int, Query(ge=1, le=_MAX_LIFETIME_S)] = _DEFAULT_LIFETIME_S,
    ) -> Response:
        """Return a token that admits spectators to one of this client's sessions."""
        key = (principal_of(request), session_id)
        if self._manager is None or self._manager.find(key) is None:
            raise not_found("there is no such session", code="unknown_session")
        reply = SpectatorReply(
            token=self._tokens.issue(key, expires_in_s), expires_in_s=expires_in_s
        )
        return JSONResponse(reply.model_dump(), 201, {"Cache-Control": "no-store"})

    async def _serve(self, websocket: WebSocket) -> None:
        if self._watch is None:
            await websocket.send_denial_response(
                Response("the served model has no sessions; use the HTTP routes", 404)
            )
        else:
            await self._watch.serve(websocket)
