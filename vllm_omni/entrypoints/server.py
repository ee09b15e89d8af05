# SPDX-License-Identifier: Apache-2.0
"""Endpoints and middleware that this package adds to vLLM's API server.

A new endpoint is a class with `add_routes` and `start`, and one row of `ENDPOINTS`. A WebSocket
endpoint needs no such class: `WebSocketEndpoint` takes its paths and its handler.
"""

import asyncio
import logging
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.responses import Response
from starlette.websockets import WebSocket
from vllm.engine.protocol import EngineClient

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints import websocket as websocket_options
from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.engine.drain import GracefulStop
from vllm_omni.entrypoints.engine.engine_watch import EngineWatch
from vllm_omni.entrypoints.engine.environment import read_struct
from vllm_omni.entrypoints.engine.ranks import SessionRanks, num_ranks
from vllm_omni.entrypoints.engine.readiness import Readiness, ReadyRoute
from vllm_omni.entrypoints.limits.access import BrowserAccess, configured_keys
from vllm_omni.entrypoints.limits.body_timeout import BodyLimits, BodyTimeout
from vllm_omni.entrypoints.limits.flood_delay import FloodDelay
from vllm_omni.entrypoints.limits.handshake_guard import HandshakeGuard
from vllm_omni.entrypoints.openai import adapter_route
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.routes import OpenAIRoutes
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.operations import Operations
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.live_client import RealtimeEndpoint
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.generate import handler
from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration
from vllm_omni.entrypoints.realtime.sessions.recorder import Recorder, recording_header
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.video import handler as video_handler
from vllm_omni.entrypoints.realtime.world_camera import handler as world_camera_handler
from vllm_omni.entrypoints.session_routes import SessionRoutes
from vllm_omni.entrypoints.staging_directory import StagingDirectory
from vllm_omni.entrypoints.webui import pages

_CODEC_THREADS: Final = 4
_HEADER_BYTES: Final = 16 << 20
"""Upper bound of a snapshot's size in addition to its tensors."""

logger = logging.getLogger("vllm." + __name__)


@dataclass
class ServerContext:
    """What endpoints may use after the engine has started.

    Endpoints start in the order of `ENDPOINTS`; each may replace `media_bytes` and append to
    `room_checks`.
    """

    client: EngineClient
    """vLLM's engine client of this API server process."""
    args: Namespace
    """The server's parsed arguments."""
    omni: OmniConfig
    """Options of this package."""
    limits: EndpointLimits
    """Limits of WebSocket connections and sessions."""
    ranks: SessionRanks
    """Which data-parallel rank serves a session; shared by all endpoints."""
    threads: Executor
    """Threads that decode images and encode frames."""
    sessions: SessionManager
    """Live sessions of this process; unused by a model without sessions."""
    served: ServedModel
    """Names, capabilities and sizes of the served model."""
    engine: OmniEngine
    """Requests and collective calls of this package."""
    room_checks: list[Callable[[], bool]] = field(default_factory=list)
    """The server accepts new work if all of them return True."""
    media_bytes: Callable[[], int] = int
    """Returns the bytes of stored media files. May block: call it in a thread."""

    @property
    def is_world(self) -> bool:
        """Whether the model keeps sessions that are steered while they run."""
        return self.served.capabilities.is_world

    @classmethod
    async def create(
        cls, client: EngineClient, state: State, args: Namespace, operations: Operations
    ) -> "ServerContext":
        """Build the context of one API server process and start what all endpoints share."""
        omni = OmniConfig.from_additional_config(client.vllm_config.additional_config)
        await operations.start_serving(client, omni)
        limits = EndpointLimits.from_env()
        name = args.served_model_name[0] if args.served_model_name else Path(args.model).name
        names = list(dict.fromkeys([*(args.served_model_name or [args.model]), name]))
        ranks = SessionRanks(num_ranks(client.vllm_config), offset=os.getpid())
        threads = ThreadPoolExecutor(_CODEC_THREADS, thread_name_prefix="omni-codec")
        recorder = None
        if omni.record_dir is not None:
            recorder = Recorder(Path(omni.record_dir), recording_header(client.vllm_config))
        sessions = SessionManager(
            SessionEngine(client, ranks, recorder),
            StreamInfo.from_vllm_config(client.vllm_config, model=name),
            limits,
            threads,
            args.allowed_origins,
            operations.quotas,
        )
        # vLLM lists these adapters at /v1/models; the state has them before it starts endpoint
        # plugins.
        adapters = state.openai_serving_models.lora_requests
        sessions.adapters = lambda: adapters
        served = replace(
            ServedModel.from_vllm_config(client.vllm_config, names), adapters=lambda: adapters
        )
        return cls(
            client, args, omni, limits, ranks, threads, sessions, served, OmniEngine(client, ranks)
        )


class Endpoint(Protocol):
    """One row of `ENDPOINTS`."""

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        """Add the routes while vLLM builds the application.

        Returns:
            Paths that clients may request without an API key.
        """
        ...

    async def start(self, server: ServerContext) -> None:
        """Prepare for requests. Called once, after engine startup and before the server listens."""
        ...


class WebSocketEndpoint:
    """WebSocket endpoint of models with sessions. Other models refuse the handshake with 404."""

    def __init__(
        self, paths: Sequence[str], create: Callable[[ServerContext], RealtimeEndpoint]
    ) -> None:
        """Initialize the endpoint.

        Args:
            paths: Paths that lead to it.
            create: Builds the endpoint after the engine has started.
        """
        self._paths, self._create = paths, create
        self._endpoint: RealtimeEndpoint | None = None

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        for path in self._paths:
            app.add_api_websocket_route(path, self._serve)
        return ()

    async def start(self, server: ServerContext) -> None:
        if server.is_world:
            self._endpoint = self._create(server)

    async def _serve(self, websocket: WebSocket) -> None:
        if self._endpoint is None:
            await websocket.send_denial_response(Response("the served model is no world", 404))
        else:
            await self._endpoint.serve(websocket)


def _world_camera(server: ServerContext) -> RealtimeEndpoint:
    max_bytes = websocket_options.WebSocketOptions.from_args(server.args).max_bytes
    return world_camera_handler.world_camera_endpoint(server.sessions, max_bytes)


class OpenAIEndpoint:
    """OpenAI's image, video and chat routes."""

    def __init__(self) -> None:
        self._routes = OpenAIRoutes()

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        self._routes.attach_to_app(app)
        return ()

    async def start(self, server: ServerContext) -> None:
        self._routes.start_serving(server.engine, server.served, server.limits, server.threads)
        server.room_checks.append(self._routes.has_room)
        server.media_bytes = self._routes.media_bytes


class AdapterEndpoint:
    """`/v1/load_lora_adapter`: vLLM's route with a status for adapters that do not fit."""

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        adapter_route.attach(app)
        return ()

    async def start(self, server: ServerContext) -> None:
        pass


class SessionsEndpoint:
    """`/v1/sessions`: snapshots of live sessions."""

    def __init__(self) -> None:
        self._routes = SessionRoutes()

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        self._routes.attach_to_app(app)
        return ()

    async def start(self, server: ServerContext) -> None:
        if not server.is_world:
            return
        omni = server.omni
        staging = StagingDirectory(Path(omni.snapshot_dir or tempfile.gettempdir()))
        drained = None if omni.drain_snapshot_dir is None else Path(omni.drain_snapshot_dir)
        migration = SessionMigration(server.sessions, staging, drained, omni.snapshot_period_s)
        (stats, *_) = await server.engine.session_stats()
        world_size = server.client.vllm_config.parallel_config.world_size
        max_bytes = (
            None if stats["max_bytes"] is None else stats["max_bytes"] * world_size + _HEADER_BYTES
        )
        self._routes.start_serving(migration, max_bytes)
        await asyncio.to_thread(migration.sweep)
        if count := await migration.take_over():
            logger.info("sessions_taken_over count=%d", count)


class ReadyEndpoint:
    """`/omni/ready`. Follows every endpoint that appends to `room_checks`."""

    def __init__(self) -> None:
        self._route = ReadyRoute()

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        self._route.attach_to_app(app)
        return ()

    async def start(self, server: ServerContext) -> None:
        sessions = server.sessions
        self._route.readiness = Readiness(
            server.engine,
            read_struct(MediaLimits).stats_interval_s,
            has_room=lambda: sessions.has_room and all(check() for check in server.room_checks),
            can_make_room=(lambda: sessions.can_make_room) if server.is_world else None,
            media_bytes=server.media_bytes,
            reply_bytes=lambda: sessions.held_bytes,
        )


class WebPageEndpoint:
    """The web page. It is served without an API key, because the page itself requests the key."""

    def __init__(self) -> None:
        self._is_world = True

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        return pages.attach(app, Path(app.state.args.model), lambda: self._is_world)

    async def start(self, server: ServerContext) -> None:
        self._is_world = server.is_world
        if (address := pages.address(server.args)) is not None:
            logger.info("web page: %s", address)


ENDPOINTS: Final[tuple[Callable[[], Endpoint], ...]] = (
    lambda: WebSocketEndpoint(world_camera_handler.PATHS, _world_camera),
    lambda: WebSocketEndpoint(
        handler.PATHS, lambda server: handler.generate_endpoint(server.sessions)
    ),
    lambda: WebSocketEndpoint(
        video_handler.PATHS, lambda server: video_handler.video_endpoint(server.sessions)
    ),
    OpenAIEndpoint,
    AdapterEndpoint,
    SessionsEndpoint,
    ReadyEndpoint,
    WebPageEndpoint,
)
"""All endpoints, in the order in which they start."""


class OmniServer:
    """Endpoints, middleware and life cycle of one API server process."""

    def __init__(self) -> None:
        self._endpoints = [create() for create in ENDPOINTS]
        self._operations = Operations()
        self._stop = GracefulStop()
        self._watch = EngineWatch()

    def attach(self, app: FastAPI) -> None:
        """Add all routes and middleware. Middleware that is added later sees a request earlier."""
        limits = EndpointLimits.from_env()
        open_paths = [path for endpoint in self._endpoints for path in endpoint.add_routes(app)]
        websocket_options.apply_at_startup(app, limits.frame_budget)
        HandshakeGuard(limits.handshake_timeout_s).attach_to_app(app)
        app.add_middleware(BodyTimeout, limits=read_struct(BodyLimits))
        app.add_middleware(FloodDelay)
        self._stop.attach_to_app(app)
        self._watch.attach_to_app(app)
        self._operations.attach_to_app(app)
        BrowserAccess(configured_keys(app.state.args)).attach_to_app(app, open_paths=open_paths)

    async def start(self, client: EngineClient, state: State, args: Namespace) -> None:
        """Start every endpoint, the graceful stop and the watch over the engine."""
        server = await ServerContext.create(client, state, args, self._operations)
        for endpoint in self._endpoints:
            await endpoint.start(server)
        sessions, engine = server.sessions, server.engine
        self._stop.start_handling_signals(
            lambda: sessions.drain.drain_sessions(sessions), server.omni.drain_timeout_s
        )
        self._watch.start_watching(
            lambda: engine.is_dead,
            await engine.process_ids(),
            server.omni.rank_timeout_s,
            sessions.engine_died,
        )
