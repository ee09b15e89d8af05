# SPDX-License-Identifier: Apache-2.0
"""Walk through a world on a server, along a camera path or with keys, and save the video.

    python examples/online_serving/world_camera.py --image start.png --camera-path walk/ \\
        --output walk.mp4
    python examples/online_serving/world_camera.py --image start.png --keys "w*12 wl*6 l*6" \\
        --output walk.mp4
    python examples/online_serving/world_camera.py --image start.png \\
        --actions "w*6 w+jump yaw=0.1" --output walk.mp4

`walk/` contains `poses.npy` (float [N, 4, 4], camera to world, OpenCV axes, one pose per frame) and
`intrinsics.npy` ([N, 4] or [4]: fx, fy, cx, cy). `--keys` lists the keys held in each latent frame
(4 video frames). The w, a, s and d keys move the camera, i, k, j and l turn it, and `-` means no
key. `--actions` works with any model: it lists buttons and `axis=value`, joined by `+`, for each
latent frame. The server refuses unknown controls with an error that lists the model's controls.

The client reconnects after a lost connection, waits for a server that is restarting (`--retry-s`),
and sends an interrupted request again with the same id to continue it. Each connection names the
session (`?session=NAME`), so a proxy forwards it to the session's server. If the server no longer
has frames that have not arrived, the client starts the session again from the image and skips the
frames that it already has. If the session moves to another server, the client follows it.
"""

import argparse
import io
import os
import sys
import time
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from vllm_omni.entrypoints.loopback import websocket_proxy
from vllm_omni.entrypoints.media.mp4 import decode_mp4, encode_mp4
from vllm_omni.entrypoints.realtime.connection.codec import decode, encode
from vllm_omni.entrypoints.realtime.controls.key_script import parse_actions, parse_keys

DEFAULT_PROMPT = "A walk through a landscape, steady camera"
PATH = "/v1/realtime/world/camera"
MAX_RECONNECTS = 5
MAX_RESTARTS = 5
TRY_AGAIN = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Walk through a world that `vllm serve --omni` serves."
    )
    add = parser.add_argument
    add("--image", "-i", type=Path, help="start image: PNG, JPEG or WebP; required by most models")
    steer_by = parser.add_mutually_exclusive_group().add_argument
    steer_by("--camera-path", "-c", type=Path, help="directory with poses.npy and intrinsics.npy")
    keys_help = "keys held in each latent frame, for example 'w*6 wl*3 -' (default: w*9)"
    steer_by("--keys", default="w*9", help=keys_help)
    steer_by("--actions", help="actions of each latent frame, for example 'w*6 w+jump yaw=0.1*3 -'")
    add(
        "--prompt", "-p", help=f"scene prompt (default: {DEFAULT_PROMPT!r}, if the model takes one)"
    )
    server_help = "ws:// or wss:// address of the server"
    add("--server", "-s", default="ws://127.0.0.1:8000", help=server_help)
    key = os.environ.get("VLLM_API_KEY")
    add("--api-key", default=key, help="default: the variable VLLM_API_KEY")
    add("--session-id", help="continue this session (default: a new one)")
    add("--output", "-o", type=Path, default=Path("world.mp4"), help=".mp4, or .npy for raw frames")
    add("--width", type=int, help="default: the server's")
    add("--height", type=int, help="default: the server's")
    add("--fps", type=float, help="default: the model's")
    add("--num-frames", type=int, help="poses per call (default: all in one call)")
    add("--num-calls", type=int, default=1, help="consecutive calls of the session (default: 1)")
    add("--frames-per-chunk", type=int, help="frames per message (default: a whole chunk)")
    codecs = ("mp4", "jpeg", "ndarray_u8", "ndarray_f32")
    add("--codec", default="mp4", choices=codecs, help="frames on the wire")
    add("--seed", type=int, default=42)
    retry_help = "seconds to wait for a server that is restarting (default: 180)"
    add("--retry-s", type=float, default=180.0, help=retry_help)
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.output.suffix not in (".mp4", ".npy"):
        parser.error(f"--output must end in .mp4 or .npy, got {args.output}")
    if args.image is not None and not args.image.is_file():
        parser.error(f"--image: there is no file {args.image.absolute()}")
    console = Console(stderr=True)
    try:
        frames_THWC, fps = walk(args, console)
    except (WorldError, OSError, ValueError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.output.suffix == ".npy":
        np.save(args.output, frames_THWC)
    else:
        args.output.write_bytes(encode_mp4(frames_THWC, fps))
    console.print(f"wrote {args.output}: {len(frames_THWC)} frames, {len(frames_THWC) / fps:.1f} s")
    return 0


class WorldError(Exception):
    """The server refused a request."""


class NoServer(WorldError):
    """The server does not accept connections, for example because it is still starting."""


class FramesLost(WorldError):
    """The server no longer has frames that the client has not received.

    Args:
        chunk: First chunk from which the session may be able to continue.
        rest: Request for the rest of the call, from `chunk` on, or None if no chunks are left.
    """

    def __init__(self, message: str, chunk: int, rest: dict[str, Any] | None) -> None:
        super().__init__(message)
        self.chunk, self.rest = chunk, rest


def walk(args: argparse.Namespace, console: Console) -> tuple[np.ndarray, float]:
    """Send all requests, and return uint8 frames `[T, H, W, 3]` and their frame rate. Raises
    WorldError.
    """
    parts: list[np.ndarray] = []
    fps = args.fps or 16.0
    session_id = args.session_id or f"walk-{uuid.uuid4().hex}"
    args.query, args.was_connected = {"session": session_id}, False
    console.print(f"session {session_id}", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    camera = read_camera(args.camera_path) if args.camera_path is not None else None
    number, used, num_restarts = 0, 0, 0
    has_start = args.session_id is None  # whether this program has requested the first chunk
    next_chunk = 0 if has_start else None
    next_frame: int | None = None
    rest: dict[str, Any] | None = None
    with Progress(
        *columns, TextColumn("messages"), TimeElapsedColumn(), console=console
    ) as progress:
        while number < args.num_calls:
            request = rest
            if request is None:
                steering = steer(args, camera, used)
                if steering is None:
                    break
                request = {
                    "endpoint": "infer",
                    "protocol_version": 1,
                    "session_id": session_id,
                    "request_id": uuid.uuid4().hex,
                    "extra_body": extra_body(args),
                    **steering,
                }
                # After a restart, the server may continue from an earlier chunk (see `rest_of`).
                if next_chunk is not None:
                    request["chunk_index"] = next_chunk
                if number == 0 and args.image is not None:
                    request["image"] = args.image.read_bytes()
                if number == 0 and num_restarts:
                    request["restart"] = True
            task = progress.add_task(f"call {number + 1}", total=None)
            arrived_s = time.monotonic()
            try:
                for message in responses(args, request, console):
                    progress.update(task, total=message["total"], completed=message["index"] + 1)
                    has_start = has_start or message["first_frame"] == 0
                    first_frame, next_chunk = message["first_frame"], message["chunk_index"] + 1
                    missing = 0 if next_frame is None else first_frame - next_frame
                    used += message["num_frames"] + max(0, missing)
                    if missing < 0:
                        continue  # a restarted session generates frames that have already arrived
                    if missing:
                        console.print(f"[red]{missing} frames are missing from the video[/red]")
                    now_s = time.monotonic()
                    progress.console.print(describe(message, now_s - arrived_s), soft_wrap=True)
                    arrived_s, fps = now_s, message["fps"]
                    next_frame = first_frame + message["num_frames"]
                    parts.append(frames_of(message))
            except FramesLost as error:
                progress.remove_task(task)
                if not has_start:  # only the program that started the session can start it again
                    console.print(f"{error}; trying from chunk {error.chunk} on", soft_wrap=True)
                    rest, next_chunk = error.rest, error.chunk
                    number += rest is None
                elif num_restarts < MAX_RESTARTS:
                    console.print(f"{error}; starting the session again", soft_wrap=True)
                    number, used, next_chunk, rest, num_restarts = 0, 0, 0, None, num_restarts + 1
                else:
                    raise
            except BaseException:
                # Hide a progress bar that shows no progress, because it would look unfinished above
                # the error.
                progress.update(task, visible=progress.tasks[task].completed > 0)
                raise
            else:
                number, rest = number + 1, None
    return np.concatenate(parts), fps


def extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the user has set. The server uses its defaults for all others."""
    names = ("width", "height", "fps", "frames_per_chunk", "seed")
    named = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    policy = "hold_last" if args.camera_path is None else "trim"
    return {**named, "video_format": args.codec, "pose_policy": policy}


def read_camera(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read float32 poses `[N, 4, 4]` from a folder, with intrinsics for each pose or for all
    poses.
    """
    poses_N44, intrinsics = (
        np.load(folder / f"{name}.npy").astype(np.float32) for name in ("poses", "intrinsics")
    )
    return poses_N44, intrinsics


def steer(
    args: argparse.Namespace, camera: tuple[np.ndarray, np.ndarray] | None, used: int
) -> dict[str, Any] | None:
    """Return the controls for the next request: actions, or the camera path from pose `used` on.

    The result is None at the end of the path. The server uses only the poses that fill whole
    chunks. The next request sends the remaining poses again.
    """
    if camera is None:
        is_keys = args.actions is None
        return {"actions": parse_keys(args.keys) if is_keys else parse_actions(args.actions)}
    poses_N44, intrinsics = camera
    part = slice(used, used + (args.num_frames or len(poses_N44)))
    if used >= len(poses_N44):
        return None
    per_frame = intrinsics.ndim > 1 and len(intrinsics) == len(poses_N44)
    return {
        "cameras": {
            "poses": poses_N44[part],
            "intrinsics": intrinsics[part] if per_frame else intrinsics,
        }
    }


def responses(
    args: argparse.Namespace, request: dict[str, Any], console: Console
) -> Iterator[dict[str, Any]]:
    """Yield each frame message of a request once, across reconnects. Raises WorldError."""
    call = Call(args, request, console)
    while call.attempt <= MAX_RECONNECTS:
        is_lost = args.was_connected and not call.has_moved
        try:
            with reopen_world(args, call.attempt) if is_lost else open_world(args) as world:
                args.was_connected = True
                call.start(world)
                while not call.has_moved:
                    message = receive(world)
                    if call.take(world, message):
                        yield message
                    if call.is_done:
                        return
            if call.is_done:  # the session has moved after its last chunk
                return
        except ConnectionClosed as error:
            console.print(f"connection lost ({error}); trying again")
            call.attempt += 1
    raise WorldError(f"{args.server} went away {MAX_RECONNECTS + 1} times")


class Call:
    """A request, and what has arrived for it on all connections so far."""

    def __init__(self, args: argparse.Namespace, request: dict[str, Any], console: Console) -> None:
        self.attempt = 0
        """Number of reconnections after a lost connection."""
        self.has_moved = self.is_done = False
        self._args, self._console = args, console
        self._request, self._hello = request, dict[str, Any]()
        self._first_chunk: int | None = request.get("chunk_index")
        self._next_chunk = self._first_chunk
        """First chunk that has not completely arrived. None: unknown until the first frame."""
        self._next_frame: int | None = None
        self._chunk_frames = 0  # frames of the latest chunk that have arrived
        self._is_resuming = self._has_resumed = False
        self._to_replay = 0  # messages that the server still sends again before the rest

    def start(self, world: ClientConnection) -> None:
        """Send the request on a new connection."""
        self.has_moved = self._is_resuming = self._has_resumed = False
        self._to_replay = 0
        self._hello = decode(world.recv(decode=False)).value
        self._request = {**self._request, **prompt_of(self._args, self._hello)}
        world.send(encode(self._request))

    def take(self, world: ClientConnection, message: dict[str, Any]) -> bool:
        """Process a message, and return whether it contains new frames. Raises WorldError."""
        match message["type"]:
            case "done":
                self.is_done = True
            case "frame":
                return self._take_frame(world, message)
            case "moved":
                self._take_move(message)
            case "stopped":
                resume = {"endpoint": "resume", "session_id": self._request["session_id"]}
                last = {"last_chunk_id": self._next_chunk - 1} if self._next_chunk else {}
                world.send(encode({**resume, **last}))
                self._is_resuming = True
            case "resumed":
                self._is_resuming, self._to_replay = False, message["replayed"]
                if not self._to_replay:
                    self._send_rest(world, self._next_chunk)
            case "error":
                self._take_error(world, message)
        return False

    def _take_frame(self, world: ClientConnection, message: dict[str, Any]) -> bool:
        first, chunk = message["first_frame"], message["chunk_index"]
        is_new = self._next_frame is None or first >= self._next_frame
        if is_new:
            self._next_frame = first + message["num_frames"]
            self._first_chunk = chunk if self._first_chunk is None else self._first_chunk
            self._chunk_frames += message["num_frames"]
            self._next_chunk = chunk
            if self._chunk_frames >= message["chunk_frames"]:
                self._next_chunk, self._chunk_frames = chunk + 1, 0
        if self._to_replay:
            self._to_replay -= 1
            if not self._to_replay:
                self._send_rest(world, self._next_chunk)
        return is_new

    def _take_move(self, message: dict[str, Any]) -> None:
        follow(self._args, message)
        self._console.print(f"the session moves to the server {message['server']}")
        self.has_moved, chunk = True, message["next_chunk_index"]
        if self._first_chunk is None:
            self._first_chunk = chunk
        self._send_rest(None, chunk)

    def _take_error(self, world: ClientConnection, message: dict[str, Any]) -> None:
        code = message["code"]
        if code == "resync_required":
            self._resynchronize(world, message)
        elif 0 < self.attempt < MAX_RECONNECTS and code == "cancelled":
            # The server is still ending the request of the lost connection.
            self.attempt += 1
            time.sleep(FIRST_PAUSE_S)
            world.send(encode(self._request))
        elif self.attempt and code == "out_of_order":
            chunk = message["expected"]
            if self._next_chunk is not None and chunk > self._next_chunk:
                raise self._frames_lost(chunk)
            self._console.print(f"the server continues from its snapshot, chunk {chunk}")
            self._send_rest(world, chunk)
        elif self._args.image is None and code in ("missing_image", "session_evicted"):
            named = self._args.session_id
            retained = f" has no session {named!r}: it was closed or never started"
            raise WorldError(
                f"{self._args.server}{retained if named else ' needs a start image'}; "
                "start one with --image"
            )
        else:
            raise WorldError(f"{code}: {message['message']}")

    def _resynchronize(self, world: ClientConnection, error: dict[str, Any]) -> None:
        """Continue after the server has refused to continue a request under its id.

        The server refuses this if its delivery log no longer contains the request's first frames,
        or if the engine finished a chunk while the server cancelled it. The client first asks for
        the frames that it has missed, and then for the rest with a new request.

        Raises:
            FramesLost: The server does not have the missed frames.
        """
        if self._next_chunk is None:
            self._request = {**self._request, "request_id": uuid.uuid4().hex}
            world.send(encode(self._request))
        elif self._is_resuming:
            raise self._frames_lost(error["next_chunk_index"])
        elif self._has_resumed:  # the engine is ahead of the server by a chunk without frames
            raise self._frames_lost(self._next_chunk + 1)
        else:
            self._has_resumed = True
            world.send(encode({"endpoint": "stop", "session_id": self._request["session_id"]}))

    def _frames_lost(self, chunk: int) -> FramesLost:
        lost = f"the server no longer has the frames of chunk {self._next_chunk}"
        return FramesLost(lost, chunk, self._rest(chunk))

    def _rest(self, chunk: int) -> dict[str, Any] | None:
        return rest_of({**self._request, "chunk_index": self._first_chunk}, chunk, self._hello)

    def _send_rest(self, world: ClientConnection | None, chunk: int | None) -> None:
        """Replace the request by the one for the rest, and send it if there is a connection."""
        assert chunk is not None
        rest = self._rest(chunk)
        if rest is None:
            self.is_done = True
            return
        self._request, self._first_chunk = rest, chunk
        if world is not None:
            world.send(encode(rest))


def prompt_of(args: argparse.Namespace, hello: dict[str, Any]) -> dict[str, str]:
    """Return the given prompt or, if the request starts a session and the model takes prompts, the
    default prompt.
    """
    takes_one = hello.get("actions", {}).get("prompt", "required") != "none"
    starts = args.session_id is None or args.image is not None
    prompt = args.prompt or (DEFAULT_PROMPT if takes_one and starts else None)
    return {} if prompt is None else {"prompt": prompt}


def rest_of(request: dict[str, Any], chunk: int, hello: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request that asks for the rest of `request`, from chunk `chunk` on, or None if no
    chunks are left.

    Raises WorldError if the request starts after `chunk`.
    """
    first = request["chunk_index"]
    if chunk < first:
        raise WorldError(
            f"the server continues from chunk {chunk}, before this call (chunk {first}); "
            "start again"
        )
    sizes = [
        hello["chunk_frames"] if each else hello["first_chunk_frames"]
        for each in range(first, chunk)
    ]
    frames, latents = sum(sizes), sum(-(-size // hello["vae_stride"][0]) for size in sizes)
    rest = {**request, "request_id": uuid.uuid4().hex, "chunk_index": chunk}
    for name in ("image", "restart"):
        rest.pop(name, None)
    if "actions" in request:
        rest["actions"] = request["actions"][latents:]
        return rest if rest["actions"] else None
    poses_N44, intrinsics = request["cameras"]["poses"], request["cameras"]["intrinsics"]
    per_frame = intrinsics.ndim > 1 and len(intrinsics) == len(poses_N44)
    rest["cameras"] = {
        "poses": poses_N44[frames:],
        "intrinsics": intrinsics[frames:] if per_frame else intrinsics,
    }
    return rest if len(poses_N44) > frames else None


def follow(args: argparse.Namespace, moved: dict[str, Any]) -> None:
    """Set the address in `args` to the server that the session has moved to.

    If the message contains no address, a proxy at the current address finds the server by its name.
    """
    args.query = {"session": moved["session_id"]}
    if "url" in moved:
        args.server = moved["url"].replace("http", "ws", 1)
    else:
        args.query["server"] = moved["server"]


def open_world(args: argparse.Namespace) -> ClientConnection:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        return connect(
            f"{args.server.rstrip('/')}{PATH}?{urlencode(args.query)}",
            max_size=None,
            compression=None,
            additional_headers=headers,
            proxy=websocket_proxy(args.server),
        )
    except InvalidHandshake as error:
        status = error.response.status_code if isinstance(error, InvalidStatus) else None
        is_for_good = status is not None and status < 500 and status not in TRY_AGAIN
        raise (WorldError if is_for_good else NoServer)(
            f"{args.server} refused the connection: {error}"
        ) from error
    except OSError as error:
        raise NoServer(
            f"no server answers at {args.server} ({error.strerror or error}); is it still starting?"
        ) from error


def reopen_world(args: argparse.Namespace, attempt: int) -> ClientConnection:
    """Reconnect, and retry for up to `--retry-s` seconds, because a restarting server refuses
    connections.

    Args:
        args: Parsed command-line arguments.
        attempt: Number of reconnections of this call, or 0 for its first connection, which has no
            pause before the first try. The pause doubles with each reconnection.

    Raises:
        WorldError: The server did not accept a connection in time.
    """
    give_up_s = time.monotonic() + args.retry_s
    pause_s = FIRST_PAUSE_S * 2 ** (attempt - 1) if attempt else 0.0
    while True:
        time.sleep(pause_s)
        try:
            return open_world(args)
        except NoServer as error:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                raise WorldError(
                    f"{error} It did not return within {args.retry_s:g} s (--retry-s)"
                ) from error
        pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s), left_s)


def receive(world: ClientConnection) -> dict[str, Any]:
    """Return the next message after the greeting."""
    while True:
        data = world.recv()
        message = decode(data).value if isinstance(data, bytes) else {}
        if "type" in message:
            return message


def frames_of(message: dict[str, Any]) -> np.ndarray:
    """Decode a frame message of any codec to uint8 `[T, H, W, 3]`."""
    video = message["video"]
    match message["codec"]:
        case "mp4":
            return decode_mp4(video)[0]
        case "jpeg":
            return np.stack(
                [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in video]
            )
        case "ndarray_f32":
            return (np.stack(video) * 255).round().astype(np.uint8)
    return np.asarray(video)


def describe(message: dict[str, Any], seconds: float) -> str:
    timing = ", ".join(
        f"{name.removesuffix('_ms')} {value:.0f}" for name, value in message["timing"].items()
    )
    warnings = "".join(f" [{text}]" for text in message.get("warnings", []))
    return (
        f"chunk {message['chunk_id']}: {message['num_frames']} frames in {1000 * seconds:.0f} "
        f"ms ({timing}){warnings}"
    )


if __name__ == "__main__":
    sys.exit(main())
