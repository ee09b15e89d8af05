# SPDX-License-Identifier: Apache-2.0
"""Server for realtime_load.py: an endpoint in a real uvicorn server, with a model that does nothing
but return each chunk when it is due.

`TimerModel` replaces vLLM's engine client and returns chunks of `chunk_frames` frames. Chunk n of a
session is due n chunk durations after the first chunk. The model returns each chunk when it is due,
with the due time stamped into its pixels. The endpoint's latency is the time from when a chunk is
due to when it reaches the client's socket. `GET /state` returns the number of connections and the
model's current work.
"""

import asyncio
import gc
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import uvicorn
from fastapi import FastAPI
from realtime_clients import STAMP

from vllm_omni.actions import CAMERA_SPACE
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.generate.handler import PATHS, generate_endpoint
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.websocket import WebSocketOptions
from vllm_omni.outputs import pack


class TimerModel:
    """Returns chunks of `height` x `width` frames. A session that requests its chunks in time gets
    `fps` frames per second.
    """

    def __init__(self, height: int, width: int, fps: float, chunk_frames: int) -> None:
        frames_THWC = torch.zeros(chunk_frames, height, width, 3, dtype=torch.uint8)
        frames_THWC[0, 0, 0, 0] = 255
        self._template = pack({}, {"frames": frames_THWC}).numpy().tobytes()
        self._at = self._template.index(b"\xff" + bytes(64))
        self._period_s = chunk_frames / fps
        # engine's session id -> [due time of the next chunk, number of chunks generated]
        self._worlds: dict[str, list[float]] = {}
        self._live: dict[str, asyncio.Future[None]] = {}
        self.aborted_s: list[float] = []

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def num_worlds(self) -> int:
        return len(self._worlds)

    async def encode(self, prompt: Any, pooling_params: Any, request_id: str) -> AsyncIterator[Any]:
        # The parameters are not validated, because the worker's time must not count as the
        # endpoint's.
        params = pooling_params.extra_kwargs["omni"]
        if params.get("op", "generate") == "generate":
            data = await self._generate(params["session_id"], request_id)
        else:
            self._worlds.pop(params["session_id"], None)
            data = pack({"op": params["op"]})
        yield SimpleNamespace(outputs=SimpleNamespace(data=data), finished=True)

    async def _generate(self, session_id: str, request_id: str) -> torch.Tensor:
        now_s = time.monotonic()
        world = self._worlds.setdefault(session_id, [now_s + self._period_s, 0])
        # If the request is late, the session's schedule restarts.
        if now_s > world[0] + self._period_s:
            world[0] = now_s
        deadline_s, number = world
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._live[request_id] = done
        loop.call_later(max(0.0, deadline_s - now_s), lambda: done.done() or done.set_result(None))
        await done  # as with vLLM, a caller that is cancelled here must call `abort`
        self._live.pop(request_id, None)
        world[0], world[1] = deadline_s + self._period_s, number + 1
        envelope = bytearray(self._template)
        STAMP.pack_into(envelope, self._at, deadline_s, int(number))
        return torch.frombuffer(envelope, dtype=torch.uint8)

    async def abort(self, request_id: str) -> None:
        if self._live.pop(request_id, None) is not None:
            self.aborted_s.append(time.monotonic())


def main() -> None:
    """Run `realtime_server.py OPTIONS`, where OPTIONS is a JSON object: print the port, and serve
    until standard input ends.
    """
    options = json.loads(sys.argv[1])
    model = TimerModel(options["height"], options["width"], options["fps"], options["chunk_frames"])
    sessions = options["sessions"] + 64
    info = StreamInfo(
        height=options["height"],
        width=options["width"],
        fps=options["fps"],
        vae_stride=(1, 8, 8),
        latent_frames_per_chunk=options["chunk_frames"],
        max_sessions=sessions,
        actions=msgspec.structs.replace(CAMERA_SPACE, image="optional"),
        model="timer",
    )
    limits = EndpointLimits(max_connections=2 * sessions, sessions_per_client=sessions)
    manager = SessionManager(SessionEngine(model), info, limits, ThreadPoolExecutor(2))  # type: ignore[arg-type]
    app = FastAPI()
    app.add_api_websocket_route(PATHS[0], generate_endpoint(manager).serve)

    @app.get("/state")
    async def state() -> dict[str, Any]:
        return {
            "connections": len(server.server_state.connections) - 1,  # excludes the requester's own
            "sessions": len(manager),
            "worlds": model.num_worlds,
            "running": model.running,
            "held_bytes": manager.held_bytes,
            "aborted_s": model.aborted_s[-1000:],
        }

    @app.get("/omni/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    config = uvicorn.Config(app, log_level="warning", access_log=False, loop=options["loop"])
    WebSocketOptions().apply(config)
    limits.frame_budget.apply(config)
    server = uvicorn.Server(config)
    app.state.server = server
    gc.collect()
    # vLLM's server also freezes the heap after startup, because a full garbage collection would
    # stop all requests for 100 ms.
    gc.freeze()
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(listener.getsockname()[1], flush=True)
        server.run(sockets=[listener])


if __name__ == "__main__":
    main()
