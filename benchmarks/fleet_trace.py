# SPDX-License-Identifier: Apache-2.0
"""Replay a trace of visits on several servers behind HAProxy.

The trace is replayed with and without suspending and moving sessions.

    # 3 servers, each of which takes as long for a chunk as causal Wan 1.3B on an H200
    python benchmarks/fleet_trace.py
    # causal Wan 1.3B with random weights on one GPU, without HAProxy
    python benchmarks/fleet_trace.py --model 1.3B --ways suspend --play-s 8 --idle-s 24 --seed 1 \\
        --seconds 60 --device-sessions 9 --model-options '{"preset": "realtime", \\
        "window_frames": 9, "sink_frames": 3, "video_input": false}'
    # try it without a GPU
    python benchmarks/fleet_trace.py --model tiny --ways suspend --seconds 10 --play-s 3 --idle-s 3

A viewer plays, is idle, plays again and leaves. The trace's distributions follow published work.
The times between arrivals are gamma-distributed, with the shape parameter that BurstGPT uses to
generate bursts (arXiv 2401.17644, github.com/HPMLL/BurstGPT, `example/src/burstgpt/config.py`). The
lengths of playing and idle periods are log-normally distributed, with the sigmas that Veloso et al.
measured for live streaming ("A Hierarchical Characterization of a Live Streaming Media Workload",
IMC 2002). The means are set by options. The default means are shorter than those measured for real
viewers, so a two-minute trace contains many periods.

Every viewer is a WebSocket client. The client requests its next chunk when the previous chunk has
arrived and the chunk before that has started to play. A chunk is on time if it arrives before its
predecessor has finished playing. The first chunk of each playing period has no deadline. The delay
of a period's first chunk is reported as `first_chunk_ms` at the start of a session and as
`resumed_chunk_ms` after an idle period. A viewer that is refused retries for `PATIENCE_S` seconds
and then leaves.

The same trace is replayed with each of these strategies:

- `pinned`: a session stays on its server and in device memory;
- `suspend`: idle sessions are moved out of device memory (`omni.suspend_idle_s`);
- `rebalance`: `vllm-omni rebalance` moves sessions between servers;
- `both`: `suspend` and `rebalance` together.

`waited_for_core_percent` is the share of time for which the process that waited longest was ready
to run but had no core. `playing_apart` is the difference between the highest and the lowest number
of playing sessions per server, sampled once per second. `predicted_on_time_percent` is the
percentage that scheduler_simulator.py predicts if no viewer is refused. For this prediction,
`fleet_plan.py` assigns the same playing periods to servers, without and with moves.
"""

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
import fleet_plan
import streaming_wan
from common import add_output_arguments, quantiles, save
from haproxy_latency import free_ports, proxy
from moves import KEY
from realtime_clients import GENERATE_PATH
from realtime_load import waited_s

ARRIVAL_SHAPE = 0.5
"""Shape parameter of the gamma distribution of the times between arrivals. A value of 1 gives a
Poisson process.
"""
PLAY_SIGMA, IDLE_SIGMA = 1.427, 1.321
"""Sigmas of the log-normal distributions of playing and idle periods, in this order."""
WARM_UP_S = 120.0
"""Number of seconds that are left out at the start of the trace, so the replay starts with existing
sessions.
"""
PATIENCE_S = 3.0
"""Number of seconds for which a refused viewer retries before it leaves."""
WAYS = {
    "pinned": (False, False),
    "suspend": (True, False),
    "rebalance": (False, True),
    "both": (True, True),
}
"""Maps each strategy to (whether sessions are suspended, whether sessions are moved)."""
STEPS = 2
"""Number of denoise steps per chunk of the null world."""
WAN_SESSION_BYTES, TINY_SESSION_BYTES = 1_886_702_400, 1_871_872
"""Sizes in bytes of one session of causal Wan 1.3B (480x832, preset `realtime`) and of one session
of the tiny model.
"""
COUNTED = ("sessions", "suspended", "bytes", "suspended_bytes")


@dataclass(frozen=True)
class Visit:
    """Visit of one viewer: the start and the end of each playing period, in seconds."""

    spells: tuple[tuple[float, float], ...]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        choices=("null", *streaming_wan.SIZES),
        default="null",
        help="null keeps time; others are sizes of causal Wan with random weights, on one server",
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--visits-per-s", type=float, default=0.25, help="mean rate of arrivals")
    parser.add_argument("--play-s", type=float, default=20.0, help="mean spell of playing")
    parser.add_argument("--idle-s", type=float, default=20.0, help="mean idle spell")
    parser.add_argument(
        "--spells", type=float, default=3.0, help="mean number of a viewer's spells"
    )
    parser.add_argument("--fps", type=float, default=16.0)
    parser.add_argument("--chunk-s", type=float, default=0.125, help="time of a chunk (null)")
    parser.add_argument("--device-sessions", type=int, default=8, help="that fit on a device")
    parser.add_argument("--held-sessions", type=int, default=32, help="omni.max_sessions")
    parser.add_argument("--suspend-idle-s", type=float, default=1.5)
    parser.add_argument("--rebalance-every-s", type=float, default=1.0)
    parser.add_argument(
        "--model-options", default="{}", help="JSON, as under additional_config omni.model"
    )
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="run before all other programs of the machine (SCHED_FIFO, needs root)",
    )
    parser.add_argument("--note", help="a remark about the machine, for the result")
    add_output_arguments(parser)
    return parser


def draw_trace(args: argparse.Namespace) -> list[Visit]:
    """Return the visits within `args.seconds`, in order of arrival."""
    rng = random.Random(args.seed)

    def length_s(mean_s: float, sigma: float) -> float:
        return rng.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma)

    visits, arrival_s = [], -WARM_UP_S
    while arrival_s < args.seconds:
        now_s, spells = arrival_s, []
        while True:
            end_s = now_s + length_s(args.play_s, PLAY_SIGMA)
            if end_s > 0 and now_s < args.seconds:
                spells.append((max(0.0, now_s), min(end_s, args.seconds)))
            if rng.random() < 1 / args.spells:
                break
            now_s = end_s + length_s(args.idle_s, IDLE_SIGMA)
        if spells:
            visits.append(Visit(tuple(spells)))
        arrival_s += rng.gammavariate(ARRIVAL_SHAPE, 1 / args.visits_per_s / ARRIVAL_SHAPE)
    return sorted(visits, key=lambda visit: visit.spells)


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """Return the largest number of spans that overlap at any time."""
    changes = sorted([(end, -1) for _, end in spans] + [(start, 1) for start, _ in spans])
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return most


def describe(visits: list[Visit], args: argparse.Namespace) -> dict[str, Any]:
    """Return the load that a trace causes if every chunk is on time."""
    plays = [spell for visit in visits for spell in visit.spells]
    return {
        "visits": len(visits),
        "spells": len(plays),
        "mean_playing": round(sum(end - start for start, end in plays) / args.seconds, 2),
        "most_playing": most_at_once(plays),
        "most_sessions": most_at_once([(v.spells[0][0], v.spells[-1][1]) for v in visits]),
    }


def predict(visits: list[Visit], moves: bool, args: argparse.Namespace) -> float:
    """Return the percentage of chunks that are on time in the simulation."""
    model = fleet_plan.Model("null", args.chunk_s, STEPS, 0, "")
    spells = sorted(
        (fleet_plan.Spell(n, *spell) for n, visit in enumerate(visits) for spell in visit.spells),
        key=lambda spell: spell.start_s,
    )
    gpus, _ = fleet_plan.place(spells, model.capacity(args.fps), moves, args.servers)
    results = [fleet_plan.on_time(model, gpu, args.fps, args.seed) for gpu in gpus]
    return round(100 * sum(on for on, _ in results) / sum(every for _, every in results), 2)


# ---- viewers


class RefusedError(Exception):
    """Raised if the servers have no capacity for a new session."""


@dataclass
class Tally:
    """Counters over all viewers of one replay."""

    on_time: int = 0
    chunks: int = 0
    """Number of chunks that had a deadline, whether on time or late."""
    frames: int = 0
    late_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    resumed_ms: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """Number of visits by outcome."""
    moves: int = 0
    late_in_moves: int = 0
    """Number of late chunks that were requested again on another server after a move."""
    retries: int = 0
    """Number of requests that were sent again because the server had no capacity for the session.
    """


class CameraClient:
    """Client for one `/v1/realtime/world/camera` session. When a `moved` message arrives, the
    client follows its session to the other server.
    """

    path = "/v1/realtime/world/camera"

    def __init__(self, port: int, args: argparse.Namespace, tally: Tally) -> None:
        self._port, self._args, self._tally = port, args, tally
        self._request: dict[str, Any] | None = None
        self._index = 0
        self._session: str | None = None
        self._socket: Any = None
        self.followed = False
        """Whether the last requested chunk was requested again on another server."""

    async def connect(self, query: str = "") -> None:
        from websockets.asyncio.client import connect

        self._socket = await connect(
            f"ws://127.0.0.1:{self._port}{self.path}{query}",
            max_size=None,
            compression=None,
            proxy=None,
            close_timeout=0.1,
        )
        await self._greet()

    async def _greet(self) -> None:
        hello = await self._receive()
        self._session = self._session or hello["session_id"]
        self._frames = hello["first_chunk_frames"], hello["chunk_frames"]
        self._stride = hello["vae_stride"][0]

    async def _receive(self) -> Any:
        from vllm_omni.entrypoints.realtime.connection.codec import decode

        return decode(bytes(await self._socket.recv())).value

    async def _send(self, message: Mapping[str, Any]) -> None:
        from vllm_omni.entrypoints.realtime.connection.codec import encode

        await self._socket.send(encode(message))

    async def ask(self) -> None:
        """Request the next chunk."""
        args = self._args
        self.followed = False
        options = {"steps": STEPS, "step_ms": 1e3 * args.chunk_s / STEPS}
        self._request = {
            "endpoint": "infer",
            "protocol_version": 1,
            "session_id": self._session,
            "request_id": f"{self._session}-{self._index}",
            "chunk_index": self._index,
            "actions": [["w"]] * -(-self._frames[self._index > 0] // self._stride),
            "extra_body": {"video_format": "ndarray_u8", "fps": args.fps, "options": options},
        }
        if self._index == 0:
            self._request |= {"image": start_image(), "prompt": "walk"}
        await self._send(self._request)

    async def chunk(self) -> int:
        """Receive the requested chunk and return the number of frames in it.

        Raises:
            RefusedError: The server has no capacity for the session.
        """
        while True:
            message = await self._receive()
            match message["type"]:
                case "frame":
                    self._index += message["final"]
                    if message["final"]:
                        self._request = None
                        return int(message["num_frames"])
                case "moved":
                    await self._follow(message["server"])
                case "error" if message["code"] in ("capacity", "session_busy", "busy"):
                    if self._index == 0:
                        raise RefusedError(message["code"])
                    self._tally.retries += 1
                    await asyncio.sleep(message.get("retry_after_ms", 100) / 1e3)
                    assert self._request is not None
                    await self._send(self._request)
                case "error":
                    raise RuntimeError(f"{message['code']}: {message['message']}")

    async def _follow(self, server: str) -> None:
        self._tally.moves += 1
        self.followed = self._request is not None
        await self._socket.close()
        await self.connect(f"?server={server}&session={self._session}")
        if self._request is not None:
            await self._send(self._request)

    async def idle(self, seconds: float) -> None:
        """Wait for `seconds`. If the session moves during this time, follow it to its new
        server.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout_at(until_s):
                    message = await self._receive()
                if message["type"] == "moved":  # the move is not interrupted by the timeout
                    await self._follow(message["server"])

    async def leave(self) -> None:
        """Close the session, if there is one, and then the connection."""
        if self._socket is None:
            return
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(5.0):
                await self._send({"endpoint": "close", "session_id": self._session})
                while (await self._receive())["type"] not in ("closed", "moved"):
                    pass
        await self._socket.close()


class PromptClient(CameraClient):
    """Client for one `/v1/realtime_video/generate` session, for models without a camera.

    The client grants the server credit for one chunk at a time.
    """

    path = GENERATE_PATH

    async def _greet(self) -> None:
        init = {
            "type": "init",
            "prompt": "a coast road in the evening",
            "size": f"{self._args.width}x{self._args.height}",
            "fps": round(self._args.fps),
            "realtime_output_format": "jpeg",
            "extensions": ["credit", "receipts"],
        }
        await self._send(init)
        while (message := await self._receive())["type"] != "session":
            self._check(message)

    async def _receive(self) -> Any:
        import msgspec

        message = msgspec.msgpack.decode(bytes(await self._socket.recv()))
        if message["type"] == "frame_batch_header":
            await self._socket.recv()  # images of 64 KiB or more arrive as a separate message
        return message

    async def _send(self, message: Mapping[str, Any]) -> None:
        import msgspec

        await self._socket.send(msgspec.msgpack.encode(message))

    def _check(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "error":
            if message["code"] in ("capacity", "session_limit") and self._index == 0:
                raise RefusedError(message["code"])
            raise RuntimeError(f"{message['code']}: {message['message']}")

    async def ask(self) -> None:
        await self._send({"type": "credit", "chunks": 1})

    async def chunk(self) -> int:
        while (message := await self._receive())["type"] != "chunk_stats":
            self._check(message)
        self._index += 1
        return int(message["num_frames"])

    async def idle(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def leave(self) -> None:
        if self._socket is not None:
            await self._socket.close()


def start_image() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), (90, 120, 60)).save(buffer, "PNG")
    return buffer.getvalue()


async def watch(
    visit: Visit, started_s: float, port: int, args: argparse.Namespace, tally: Tally
) -> None:
    """Play one visit from its arrival to its end."""
    from websockets.exceptions import ConnectionClosed, InvalidHandshake

    loop = asyncio.get_running_loop()
    await asyncio.sleep(started_s + visit.spells[0][0] - loop.time())
    first_s = loop.time()
    while True:
        client = (CameraClient if args.model == "null" else PromptClient)(port, args, tally)
        try:
            try:
                await client.connect()
                await play(client, visit, started_s, first_s, args, tally)
            finally:
                await client.leave()
            tally.ends["played"] += 1
            return
        except (RefusedError, InvalidHandshake):  # HAProxy responds with 503
            if loop.time() > first_s + PATIENCE_S:
                tally.ends["refused"] += 1
                return
            await asyncio.sleep(0.5)
        except (ConnectionClosed, RuntimeError) as error:
            tally.ends[f"lost: {error}"] += 1
            return


async def play(
    client: CameraClient,
    visit: Visit,
    started_s: float,
    first_s: float,
    args: argparse.Namespace,
    tally: Tally,
) -> None:
    """Play all periods of a visit. Frames that have not been shown by the end of a period count as
    shown.
    """
    loop = asyncio.get_running_loop()
    for number, (start_s, end_s) in enumerate(visit.spells):
        if number:
            await client.idle(started_s + start_s - loop.time())
        asked_s = loop.time() if number else first_s
        await client.ask()
        frames = await client.chunk()
        shown_s = loop.time()
        (tally.resumed_ms if number else tally.first_ms).append(1e3 * (shown_s - asked_s))
        tally.frames += frames
        while loop.time() < started_s + end_s:
            await client.ask()
            next_frames = await client.chunk()
            due_s, done_s = shown_s + frames / args.fps, loop.time()
            late_s = done_s - due_s
            tally.chunks += 1
            tally.late_in_moves += late_s > 0 and client.followed
            tally.on_time += late_s <= 0
            if late_s > 0:
                tally.late_ms.append(1e3 * late_s)
            before_s, shown_s, frames = shown_s, max(done_s, due_s), next_frames
            tally.frames += frames
            await asyncio.sleep(max(0.0, before_s - loop.time()))


# ---- servers


@dataclass
class Fleet:
    """The running servers of one replay."""

    ports: dict[str, int]
    file: Path
    pids: list[int] = field(default_factory=list)
    """Process ids of all server processes."""

    def read(self, name: str, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        sent = urllib.request.Request(f"http://127.0.0.1:{self.ports[name]}{path}", None, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), AnyStatus())
        with opener.open(sent, timeout=30) as response:
            found: dict[str, Any] = json.load(response)
        return found


class AnyStatus(urllib.request.HTTPErrorProcessor):
    """Passes on responses with any status instead of raising an exception, because a full server
    responds to `/omni/ready` with 503.
    """

    def http_response(self, request: Any, response: Any) -> Any:
        return response


@contextlib.contextmanager
def running_fleet(
    checkpoint: Path, folder: Path, suspend: bool, args: argparse.Namespace
) -> Iterator[Fleet]:
    from vllm_omni.entrypoints.cli import demo

    folder.mkdir()
    names = [chr(ord("a") + number) for number in range(args.servers)]
    fleet = Fleet(dict(zip(names, free_ports(len(names)), strict=True)), folder / "fleet.toml")
    fleet.file.write_text(
        "".join(
            f'[servers.{name}]\nurl = "http://127.0.0.1:{port}"\n'
            for name, port in fleet.ports.items()
        )
    )
    omni: dict[str, Any] = {
        "height": args.height,
        "width": args.width,
        "scheduling": "deadline",
        "max_sessions": args.held_sessions,
        "max_session_bytes": args.device_sessions * args.session_bytes,
        "max_suspended_bytes": args.held_sessions * args.session_bytes,
        "fleet": str(fleet.file),
        **({"suspend_idle_s": args.suspend_idle_s} if suspend else {}),
        "model": json.loads(args.model_options),
    }
    os.environ["VLLM_OMNI_OPERATOR_KEY"] = KEY
    os.environ["VLLM_OMNI_SLOT_WAIT_S"] = "0.5"
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                demo.server(
                    checkpoint,
                    port,
                    args.height,
                    args.width,
                    folder / f"{name}.log",
                    extra=(
                        *args.flags,
                        "--additional-config",
                        json.dumps({"omni": {**omni, "server_name": name}}),
                    ),
                )
            )
            for name, port in fleet.ports.items()
        ]
        for process in processes:
            demo.wait_until_healthy(process, 600)
        own = psutil.Process()
        if args.real_time:  # child processes inherit the scheduling policy
            threads = [
                t.id for child in [own, *own.children(recursive=True)] for t in child.threads()
            ]
            for thread in threads:
                os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(10))
        fleet.pids = [child.pid for child in own.children(recursive=True)]
        yield fleet


@contextlib.contextmanager
def rebalancing(fleet: Fleet, args: argparse.Namespace) -> Iterator[None]:
    command = ["rebalance", str(fleet.file), "--every", str(args.rebalance_every_s)]
    with fleet.file.with_suffix(".log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", *command],
            stdout=log,
            stderr=log,
        )
        try:
            # A client that is still importing modules would delay the servers.
            while psutil.Process(child.pid).cpu_percent(interval=1.0) > 30:
                pass
            yield
        finally:
            child.kill()
            child.wait()


@contextlib.asynccontextmanager
async def sampling(fleet: Fleet) -> AsyncIterator[list[dict[str, int]]]:
    """Yield a list, and append one sample to it per second: the total session counts of all
    servers, and the difference between the highest and the lowest number of playing sessions per
    server.
    """
    samples: list[dict[str, int]] = []

    def playing(name: str) -> int:
        sessions = fleet.read(name, "/omni/sessions")["sessions"]
        return sum(session["idle_s"] < 1.0 for session in sessions)

    async def sample() -> None:
        while True:
            replies = [
                await asyncio.to_thread(fleet.read, name, "/omni/ready") for name in fleet.ports
            ]
            counts = [await asyncio.to_thread(playing, name) for name in fleet.ports]
            sums = {name: sum(reply[name] or 0 for reply in replies) for name in COUNTED}
            samples.append({**sums, "apart": max(counts) - min(counts)})
            await asyncio.sleep(1.0)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()


async def replay(
    visits: list[Visit], port: int, fleet: Fleet, args: argparse.Namespace
) -> dict[str, Any]:
    """Replay the trace once and return the measurements."""
    # A server's first chunks take longer, so every server is warmed up.
    warm_up = [Visit(((0.0, 4.0), (5.0, 7.0)))] * args.servers
    started_s = asyncio.get_running_loop().time()
    await asyncio.gather(*(watch(visit, started_s, port, args, Tally()) for visit in warm_up))
    tally = Tally()
    pids = [os.getpid(), *fleet.pids]
    waits_s = [waited_s(pid) for pid in pids]
    async with sampling(fleet) as samples:
        started_s = asyncio.get_running_loop().time() + 0.5
        await asyncio.gather(*(watch(visit, started_s, port, args, tally) for visit in visits))
    waits_s = [waited_s(pid) - before_s for pid, before_s in zip(pids, waits_s, strict=True)]
    played_min = tally.frames / args.fps / 60
    return {
        "on_time_percent": round(100 * tally.on_time / tally.chunks, 2),
        "chunks": tally.chunks,
        "first_chunk_ms": quantiles(tally.first_ms),
        "resumed_chunk_ms": quantiles(tally.resumed_ms or [0.0]),
        "late_by_ms": quantiles(tally.late_ms or [0.0]),
        **{f"most_{name}": max(sample[name] for sample in samples) for name in COUNTED},
        "ends": dict(sorted(tally.ends.items())),
        "refused": tally.ends["refused"],
        "moves": tally.moves,
        "late_in_moves": tally.late_in_moves,
        "playing_apart": {
            "mean": round(statistics.mean(sample["apart"] for sample in samples), 2),
            "max": max(sample["apart"] for sample in samples),
        },
        "retries": tally.retries,
        "waited_for_core_percent": round(100 * max(waits_s) / args.seconds, 1),
        "played_minutes": round(played_min, 2),
        "server_seconds_per_played_minute": round(args.servers * args.seconds / played_min, 2),
    }


def write_model(folder: Path, args: argparse.Namespace) -> Path:
    """Write the checkpoint, and set the frame size and the session size in `args`."""
    if args.model == "null":
        from vllm_omni.testing.null.world.pipeline import LATENT_CHANNELS
        from vllm_omni.testing.tiny.null_world import make_tiny

        make_tiny(folder, 0, "original")
        args.height, args.width, args.flags = 32, 48, ()
        args.session_bytes = LATENT_CHANNELS * (args.height // 8) * (args.width // 8) * 4
    else:
        streaming_wan.write_checkpoint(folder, args.model)
        args.servers, args.flags = 1, ("--load-format", "dummy", "--dtype", "bfloat16")
        args.height, args.width, args.session_bytes = 480, 832, WAN_SESSION_BYTES
        if args.model == "tiny":
            args.height, args.width, args.session_bytes = 64, 96, TINY_SESSION_BYTES
            args.flags = ("--load-format", "dummy", "--enforce-eager")
    return folder


def main() -> None:
    args = make_parser().parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = write_model(Path(scratch) / "model", args)
        visits = draw_trace(args)
        print(json.dumps(describe(visits, args)), flush=True)
        for suspend in (False, True):
            ways = [way for way in args.ways if WAYS[way][0] == suspend]
            if not ways:
                continue
            folder = Path(scratch) / f"suspend-{suspend}"
            with contextlib.ExitStack() as stack:
                fleet = stack.enter_context(running_fleet(checkpoint, folder, suspend, args))
                port = next(iter(fleet.ports.values()))
                if args.servers > 1:
                    port, _ = stack.enter_context(proxy(fleet.ports))
                for way in ways:
                    with rebalancing(fleet, args) if WAYS[way][1] else contextlib.nullcontext():
                        rows[way] = asyncio.run(replay(visits, port, fleet, args))
                    if args.model == "null":
                        rows[way]["predicted_on_time_percent"] = predict(visits, WAYS[way][1], args)
                    print(way, json.dumps(rows[way]), flush=True)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "no_save")}
    result = {"settings": settings, "trace": describe(visits, args), "ways": rows}
    save("fleet_trace" + ("" if args.model == "null" else f"_{args.model}"), result, args)


if __name__ == "__main__":
    main()
