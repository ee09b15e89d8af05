# SPDX-License-Identifier: Apache-2.0
"""The `vllm.endpoint_plugins` entry point: attaches this package's doors to stock vLLM's API server.

Loaded when `VLLM_PLUGINS` names `vllm_omni` (`vllm serve --omni` sees to that) and the served model answers pooling
requests of the task `plugin`.
"""

import asyncio
import logging
import os
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.responses import Response
from starlette.websockets import WebSocket
from vllm.engine.protocol import EngineClient
from vllm.tasks import SupportedTask

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints import websocket as websocket_options
from vllm_omni.entrypoints.access import BrowserAccess, configured_keys
from vllm_omni.entrypoints.body_pace import BodyLimits, BodyPace
from vllm_omni.entrypoints.drain import GracefulStop
from vllm_omni.entrypoints.engine import OmniEngine
from vllm_omni.entrypoints.engine_watch import EngineWatch
from vllm_omni.entrypoints.environment import read_struct
from vllm_omni.entrypoints.flood_delay import FloodDelay
from vllm_omni.entrypoints.handshake_guard import HandshakeGuard
from vllm_omni.entrypoints.openai import adapter_route
from vllm_omni.entrypoints.openai.routes import OpenAIRoutes
from vllm_omni.entrypoints.operations import Operations
from vllm_omni.entrypoints.owner_lock import Spool
from vllm_omni.entrypoints.ranks import SessionRanks, num_ranks
from vllm_omni.entrypoints.readiness import Readiness, ReadyRoute
from vllm_omni.entrypoints.realtime import generate_door, video_door, world_camera
from vllm_omni.entrypoints.realtime.engine import WorldEngine
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.entrypoints.realtime.limits import DoorLimits
from vllm_omni.entrypoints.realtime.mobility import SessionMobility
from vllm_omni.entrypoints.realtime.recorder import Recorder, recording_header
from vllm_omni.entrypoints.realtime.session_manager import SessionManager
from vllm_omni.entrypoints.session_routes import SessionRoutes
from vllm_omni.entrypoints.webui import pages
from vllm_omni.processes import end_with_parent

_CODEC_THREADS: Final = 4
_HEADER_BYTES: Final = 16 << 20
"""Bound of a snapshot's bytes besides its tensors."""

logger = logging.getLogger("vllm." + __name__)


class OmniEndpoints:
    """All routes of this package in one API server process. Satisfies `EndpointPlugin`."""

    name = "vllm_omni"
    required_tasks: tuple[SupportedTask, ...] | None = ("plugin",)

    def __init__(self) -> None:
        self._camera_door: world_camera.WorldCameraDoor | None = None
        self._generate_door: generate_door.GenerateDoor | None = None
        self._video_door: video_door.VideoDoor | None = None
        self._openai = OpenAIRoutes()
        self._ready = ReadyRoute()
        self._sessions = SessionRoutes()
        self._stop = GracefulStop()
        self._watch = EngineWatch()
        self._operations = Operations()

    def attach_router(self, app: FastAPI) -> None:
        limits = DoorLimits.from_env()
        websocket_options.apply_at_startup(app, limits.frame_budget)
        HandshakeGuard(limits.handshake_timeout_s).attach(app)
        app.add_middleware(BodyPace, limits=read_struct(BodyLimits))
        app.add_middleware(FloodDelay)
        for path in world_camera.PATHS:
            app.add_api_websocket_route(path, self._world_camera)
        for path in generate_door.PATHS:
            app.add_api_websocket_route(path, self._realtime_generate)
        for path in video_door.PATHS:
            app.add_api_websocket_route(path, self._realtime_video)
        self._openai.attach(app)
        adapter_route.attach(app)
        self._ready.attach(app)
        self._sessions.attach(app)
        self._stop.attach(app)
        self._watch.attach(app)
        self._operations.attach(app)
        open_paths = pages.attach(app, Path(app.state.args.model), lambda: self._openai.served.capabilities.is_world)
        BrowserAccess(configured_keys(app.state.args)).attach(app, open_paths=open_paths)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        if engine_client is None:  # a render-only server; `required_tasks` keeps us away from it
            return
        end_with_parent()  # one of several API server processes
        limits = DoorLimits.from_env()
        served = args.served_model_name[0] if args.served_model_name else Path(args.model).name
        facts = WorldFacts.from_vllm_config(engine_client.vllm_config, model=served)
        await self._operations.start(engine_client, _options(engine_client))
        executor = ThreadPoolExecutor(_CODEC_THREADS, thread_name_prefix="omni-codec")
        ranks = SessionRanks(num_ranks(engine_client.vllm_config), offset=os.getpid())
        worlds = WorldEngine(engine_client, ranks, _recorder(engine_client))
        manager = SessionManager(worlds, facts, limits, executor, args.allowed_origins, self._operations.quotas)
        options = websocket_options.WebSocketOptions.from_args(args)
        names = dict.fromkeys([*(args.served_model_name or [args.model]), served])
        # vLLM lists these adapters at /v1/models; the state has them before it starts endpoint plugins.
        adapters = state.openai_serving_models.lora_requests
        manager.adapters = lambda: adapters
        self._openai.start(engine_client, list(names), limits, executor, ranks, lambda: adapters)
        is_world = self._openai.served.capabilities.is_world
        if is_world:
            self._camera_door = world_camera.WorldCameraDoor(manager, options.max_bytes)
            self._generate_door = generate_door.GenerateDoor(manager)
            self._video_door = video_door.VideoDoor(manager)
            await self._start_mobility(engine_client, manager, ranks)
        self._stop.start(lambda: manager.drain.run(manager), _options(engine_client).drain_timeout_s)
        engine = OmniEngine(engine_client, ranks)
        self._watch.start(
            lambda: engine.is_dead,
            await engine.process_ids(),
            _options(engine_client).rank_timeout_s,
            manager.engine_died,
        )
        self._ready.readiness = Readiness(
            engine,
            self._openai.stats_interval_s,
            has_room=lambda: manager.has_room and self._openai.has_room(),
            can_make_room=(lambda: manager.can_make_room) if is_world else None,
            media_bytes=self._openai.media_bytes,
            reply_bytes=lambda: manager.held_bytes,
        )
        if (address := pages.address(args)) is not None:
            logger.info("web page: %s", address)

    async def _start_mobility(self, client: EngineClient, manager: SessionManager, ranks: SessionRanks) -> None:
        omni = _options(client)
        spool = Spool(Path(omni.snapshot_dir or tempfile.gettempdir()))
        kept = None if omni.drain_snapshot_dir is None else Path(omni.drain_snapshot_dir)
        mobility = SessionMobility(manager, spool, kept, omni.checkpoint_s)
        (stats, *_) = await OmniEngine(client, ranks).session_stats()
        world_size = client.vllm_config.parallel_config.world_size
        most = None if stats["max_bytes"] is None else stats["max_bytes"] * world_size + _HEADER_BYTES
        self._sessions.start(mobility, most)
        await asyncio.to_thread(mobility.sweep)
        if count := await mobility.take_over():
            logger.info("sessions_taken_over count=%d", count)

    async def _world_camera(self, websocket: WebSocket) -> None:
        await _serve(self._camera_door, websocket)

    async def _realtime_generate(self, websocket: WebSocket) -> None:
        await _serve(self._generate_door, websocket)

    async def _realtime_video(self, websocket: WebSocket) -> None:
        await _serve(self._video_door, websocket)


def _options(client: EngineClient) -> OmniConfig:
    return OmniConfig.from_additional_config(client.vllm_config.additional_config)


def _recorder(client: EngineClient) -> Recorder | None:
    folder = _options(client).record_dir
    return None if folder is None else Recorder(Path(folder), recording_header(client.vllm_config))


class _Door(Protocol):
    async def serve(self, websocket: WebSocket) -> None: ...


async def _serve(door: _Door | None, websocket: WebSocket) -> None:
    """Serve one connection; a model that makes single images and videos has no realtime doors."""
    if door is None:
        await websocket.send_denial_response(Response("the served model is no world", 404))
    else:
        await door.serve(websocket)


def create_plugin() -> OmniEndpoints:
    """Return the plugin; named in pyproject's entry points."""
    return OmniEndpoints()
