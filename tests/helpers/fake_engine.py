# SPDX-License-Identifier: Apache-2.0
"""A fake of vLLM's engine client, and a real server with all endpoints.

With `FakeEngine`, an endpoint test takes milliseconds. `FakeEngine` behaves like the real engine: a
chunk is one pooling request, and a session's chunks run in order and one at a time. Cancelling an
`encode` call does not abort its request. An aborted chunk commits nothing, and errors are returned
as envelopes.
"""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from helpers.waits import seconds, wait_until
from helpers.walking import Walker
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from vllm_omni.entrypoints.environments.routes import EnvironmentRoutes
from vllm_omni.entrypoints.realtime.connection import codec
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.generate import handler
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.spectators.routes import SpectatorRoutes
from vllm_omni.entrypoints.realtime.video import handler as video_handler
from vllm_omni.entrypoints.realtime.webrtc.routes import WebRtcRoutes
from vllm_omni.entrypoints.realtime.world_camera.handler import PATHS, world_camera_endpoint
from vllm_omni.inputs import DiffusionParams, request_tensors
from vllm_omni.outputs import RequestFailed, pack, pack_error
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.start_pose import START_POSE, StartPose

FIRST, LATER = 9, 12  # number of pixel frames in the first chunk and in each later chunk


def first_frame_of(chunk_index: int) -> int:
    return 0 if chunk_index == 0 else FIRST + LATER * (chunk_index - 1)


@dataclass
class World:
    """State of one session in the fake engine."""

    height: int
    width: int
    chunk_index: int = 0
    prompts: list[str] = field(default_factory=list)
    walker: Walker | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Call:
    """The arguments of one `encode` call."""

    params: DiffusionParams
    arrays: dict[str, np.ndarray]
    started_s: float = field(default_factory=time.monotonic)


class FakeEngine:
    """An engine client that numbers its frames.

    All pixels of a session's frame n have the value n % 256. The only exception is the red value of
    pixel (0, 0), which is the chunk index.

    Args:
        delay_s: Time in seconds that each chunk takes.
        close_delay_s: Time in seconds that freeing a session takes.
        max_worlds: Maximum number of sessions.
        noise: Whether frames consist of noise, which cannot be compressed.
        start_pose: Pose that the engine recognises for every start image. Default: unknown.
        grid: Obstacles that stop walkers. If set, chunks with actions report `world_poses`.
        fail: Function called with each generate request. It can raise an error.
    """

    def __init__(self) -> None:
        self.delay_s = self.close_delay_s = 0.0
        self.max_worlds = 1000
        self.noise = False
        self.start_pose: StartPose | None = None
        self.grid: OccupancyGrid | None = None
        self.fail: Callable[[DiffusionParams], None] = lambda params: None
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.worlds: dict[str, World] = {}
        self.running = 0
        self.most_running = 0
        self.live: dict[str, asyncio.Task[Any]] = {}

    @property
    def chunks(self) -> list[Call]:
        return [call for call in self.calls if call.params.op == "generate"]

    async def encode(self, prompt: Any, pooling_params: Any, request_id: str) -> AsyncIterator[Any]:
        params = DiffusionParams.from_extra_kwargs(pooling_params.extra_kwargs)
        tensors = request_tensors(pooling_params.extra_kwargs)
        self.calls.append(Call(params, {name: tensor.numpy() for name, tensor in tensors.items()}))
        task = asyncio.create_task(self._work(params))
        if params.op == "generate":  # the engine finishes an operation even if it is aborted
            self.live[request_id] = task
        try:
            envelope = await asyncio.shield(task)
        finally:
            if task.done():
                self.live.pop(request_id, None)
        yield SimpleNamespace(outputs=SimpleNamespace(data=envelope), finished=True)

    async def abort(self, request_id: str) -> None:
        task = self.live.pop(request_id, None)
        if task is not None:
            self.aborted.append(request_id)
            task.cancel()

    async def _work(self, params: DiffusionParams) -> torch.Tensor:
        try:
            if params.op != "generate":
                await asyncio.sleep(self.close_delay_s)
                return pack(self._operate(params))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                return await self._generate(params)
            finally:
                self.running -= 1
        except RequestFailed as failure:
            return pack_error(failure.code, failure.message)

    def _operate(self, params: DiffusionParams) -> dict[str, Any]:
        if params.op == "fork":
            source = self._world(params)
            assert params.fork_to is not None
            walker = source.walker.copy() if source.walker is not None else None
            self.worlds[params.fork_to] = World(
                source.height, source.width, source.chunk_index, list(source.prompts), walker
            )
        else:
            self.worlds.pop(params.session_id, None)
        return {"op": params.op}

    def _world(self, params: DiffusionParams) -> World:
        if params.session_id not in self.worlds:
            raise RequestFailed(
                "unknown_session", f"session {params.session_id!r} is not live here"
            )
        return self.worlds[params.session_id]

    def _walker(self, params: DiffusionParams) -> Walker | None:
        given = params.options.get(START_POSE)
        start = self.start_pose if given is None else msgspec.convert(given, StartPose)
        return None if start is None else Walker(start, self.grid)

    async def _generate(self, params: DiffusionParams) -> torch.Tensor:
        if params.session_id not in self.worlds and params.chunk_index == 0:
            assert params.height is not None
            assert params.width is not None
            if len(self.worlds) >= self.max_worlds:
                raise RequestFailed("capacity", f"{len(self.worlds)} sessions are live")
            self.worlds[params.session_id] = World(
                params.height, params.width, walker=self._walker(params)
            )
        world = self._world(params)
        async with world.turn:
            index = world.chunk_index
            if params.chunk_index not in (None, index):
                raise RequestFailed(
                    "out_of_order", f"session {params.session_id!r} expects {index}"
                )
            self.fail(params)
            await asyncio.sleep(self.delay_s)
            world.chunk_index += 1
            world.prompts.append(params.prompt or "")
        count = FIRST if index == 0 else LATER
        numbers = torch.arange(first_frame_of(index), first_frame_of(index) + count) % 256
        frames_THWC = (
            numbers.to(torch.uint8)[:, None, None, None]
            .expand(-1, world.height, world.width, 3)
            .contiguous()
        )
        if self.noise:
            frames_THWC = torch.randint(0, 256, frames_THWC.shape, dtype=torch.uint8)
        frames_THWC[:, 0, 0, 0] = index % 256
        meta = {
            "chunk_index": index,
            "first_frame": first_frame_of(index),
            "num_frames": count,
            "timings_ms": {"encode": [1.0], "steps": [1.0, 1.0], "decode": [3.0], "total": [6.0]},
        }
        if world.walker is not None and params.actions is not None:
            meta["world_poses"] = world.walker.walk(params.actions, starts=index == 0)
        return pack(meta, {"frames": frames_THWC})


class EndpointServer:
    """All endpoints in a real uvicorn server, which runs on a loopback port in its own thread.

    Leaving the context does not wait for the server to stop, because uvicorn takes 0.2 s to stop
    and hundreds of tests use this class. To wait for it, call `wait_until_all_ended`.
    """

    _ending: ClassVar[list[threading.Thread]] = []

    def __init__(
        self,
        engine: FakeEngine,
        limits: EndpointLimits,
        info: StreamInfo,
        origins: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        model: Any = SessionEngine(engine)  # type: ignore[arg-type]
        self.manager = SessionManager(model, info, limits, ThreadPoolExecutor(2), origins)
        endpoints = {
            PATHS: world_camera_endpoint(self.manager, max_message_bytes=1 << 20).serve,
            handler.PATHS: handler.generate_endpoint(self.manager).serve,
            video_handler.PATHS: video_handler.video_endpoint(self.manager).serve,
        }
        app = FastAPI()
        for paths, serve in endpoints.items():
            for path in paths:
                app.add_api_websocket_route(path, serve)
        for routes in (WebRtcRoutes(), SpectatorRoutes(), EnvironmentRoutes()):
            routes.add_routes(app)
            routes.serve(self.manager)
        config = uvicorn.Config(
            app, log_level="warning", ws_per_message_deflate=False, ws_max_size=1 << 20
        )
        # Use the same WebSocket protocol class as the real server. The class writes a chunk's
        # messages together.
        limits.frame_budget.apply(config)
        self.server = uvicorn.Server(config)
        app.state.server = self.server
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    def __enter__(self) -> "EndpointServer":
        self._thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.server.should_exit = True
        self._ending.append(self._thread)

    @classmethod
    def wait_until_all_ended(cls) -> None:
        """Wait until all servers whose contexts have been left have stopped."""
        while cls._ending:
            thread = cls._ending.pop()
            thread.join(seconds(10))
            assert not thread.is_alive(), "a server has not ended 10 s after its test"

    def client(self, path: str = PATHS[0], **options: Any) -> "Client":
        return Client(
            connect(f"ws://127.0.0.1:{self.port}{path}", compression=None, max_size=None, **options)
        )


class Client:
    """A WebSocket client for this package's codec. The constructor waits for the server's `hello`
    message.
    """

    def __init__(self, connecting: ClientConnection) -> None:
        self._connecting = connecting
        self.connection = connecting.__enter__()
        self.hello = self.receive()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connecting.__exit__(None, None, None)

    def send(
        self, message: Any, dialect: codec.MessageDialect = codec.MessageDialect.OPENPI
    ) -> None:
        self.connection.send(
            message if isinstance(message, bytes | str) else codec.encode(message, dialect)
        )

    def receive(self, timeout_s: float = 10.0) -> Any:
        data = self.connection.recv(timeout=timeout_s)
        return data if isinstance(data, str) else codec.decode(data).value

    def request(
        self, message: Any, dialect: codec.MessageDialect = codec.MessageDialect.OPENPI
    ) -> Any:
        self.send(message, dialect)
        return self.receive()

    def frames(self) -> list[dict[str, Any]]:
        """Receive and return all frame messages of one request. An error message fails the test."""
        messages = []
        while not messages or not messages[-1]["final"]:
            messages.append(self.receive())
            assert messages[-1]["type"] == "frame", messages[-1]
        return messages

    def error(self, message: Any) -> str:
        """Send a message that must be refused, and return the error code."""
        response = self.request(message)
        assert response["type"] == "error", response
        return response["code"]


def camera(num_frames: int) -> dict[str, np.ndarray]:
    """Return poses that move straight ahead by 0.01 units per frame."""
    poses_N44 = np.tile(np.eye(4, dtype=np.float32), (num_frames, 1, 1))
    poses_N44[:, 2, 3] = 0.01 * np.arange(num_frames)
    return {"poses": poses_N44, "intrinsics": np.array([40.0, 40.0, 24.0, 16.0])}


def infer(num_frames: int = FIRST, **fields: Any) -> dict[str, Any]:
    """Return a valid first request. `fields` override its fields. A value of None removes the
    field.
    """
    message = {
        "endpoint": "infer",
        "image": np.full((32, 48, 3), 7, np.uint8),
        "prompt": "a path",
        "cameras": camera(num_frames),
        "extra_body": {"height": 32, "width": 48, "video_format": "ndarray_u8"},
        **fields,
    }
    return {key: value for key, value in message.items() if value is not None}


def close_code(client: Client) -> int:
    """Read until the server closes the connection, and return the close code."""
    try:
        while True:
            client.receive()
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd is not None else 1006


def numbers(messages: list[dict[str, Any]]) -> list[int]:
    """Return the frame numbers that the fake engine encoded in the frames."""
    return [int(frame[1, 1, 0]) for message in messages for frame in message["video"]]
