# SPDX-License-Identifier: Apache-2.0
"""`ENDPOINTS`: the table of all endpoints that this package adds to vLLM's API server.

To add an endpoint, add one row to `ENDPOINTS`: a class with the methods of
`server_context.ServerEndpoint`. WebSocket endpoints need no class of their own, because
`WebSocketEndpoint` takes their paths and handlers as arguments.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fastapi import FastAPI
from starlette.responses import Response
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.engine.readiness import ReadyRoute
from vllm_omni.entrypoints.environments.routes import EnvironmentRoutes
from vllm_omni.entrypoints.fleet.routes import FleetRoutes
from vllm_omni.entrypoints.openai.adapter_route import AdapterRoute
from vllm_omni.entrypoints.openai.routes import OpenAIRoutes
from vllm_omni.entrypoints.realtime.connection.live_client import RealtimeEndpoint
from vllm_omni.entrypoints.realtime.generate import handler as generate_handler
from vllm_omni.entrypoints.realtime.spectators.routes import SpectatorRoutes
from vllm_omni.entrypoints.realtime.video import handler as video_handler
from vllm_omni.entrypoints.realtime.webrtc.routes import WebRtcRoutes
from vllm_omni.entrypoints.realtime.world_camera import handler as world_camera_handler
from vllm_omni.entrypoints.server_context import ServerContext, ServerEndpoint
from vllm_omni.entrypoints.session_routes import SessionRoutes
from vllm_omni.entrypoints.websocket import WebSocketOptions
from vllm_omni.entrypoints.webui.pages import WebPage


class WebSocketEndpoint:
    """WebSocket endpoint for models with sessions. If the served model has no sessions, the
    handshake is refused with status 404.
    """

    def __init__(
        self, paths: Sequence[str], create: Callable[[ServerContext], RealtimeEndpoint]
    ) -> None:
        """Initialize the endpoint.

        Args:
            paths: The endpoint's paths.
            create: Function that builds the endpoint after the engine has started.
        """
        self._paths, self._create = paths, create
        self._endpoint: RealtimeEndpoint | None = None

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        for path in self._paths:
            app.add_api_websocket_route(path, self._serve)
        return ()

    async def start_serving(self, server: ServerContext) -> None:
        if server.is_world:
            self._endpoint = self._create(server)

    async def _serve(self, websocket: WebSocket) -> None:
        if self._endpoint is None:
            await websocket.send_denial_response(
                Response("the served model has no sessions; use the HTTP routes", 404)
            )
        else:
            await self._endpoint.serve(websocket)


ENDPOINTS: Final[tuple[Callable[[], ServerEndpoint], ...]] = (
    lambda: WebSocketEndpoint(
        world_camera_handler.PATHS,
        lambda server: world_camera_handler.world_camera_endpoint(
            server.sessions, WebSocketOptions.from_args(server.args).max_bytes
        ),
    ),
    lambda: WebSocketEndpoint(
        generate_handler.PATHS, lambda server: generate_handler.generate_endpoint(server.sessions)
    ),
    lambda: WebSocketEndpoint(
        video_handler.PATHS, lambda server: video_handler.video_endpoint(server.sessions)
    ),
    WebRtcRoutes,
    SpectatorRoutes,
    OpenAIRoutes,
    AdapterRoute,
    EnvironmentRoutes,
    SessionRoutes,
    FleetRoutes,  # after the endpoint that saves and restores sessions
    ReadyRoute,  # after every endpoint that appends to `room_checks`
    WebPage,
)
"""All endpoints, in the order in which they start."""
