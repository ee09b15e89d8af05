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
and sends an interrupted request again with the same id to continue it. If the session moves to
another server, the client follows it.
"""

import argparse
import io
import os
import sys
import time
import uuid
from collections.abc import Iterator
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
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Walk through a world that `vllm serve --omni` serves."
    )
    parser.add_argument(
        "--image", "-i", type=Path, help="start image: PNG, JPEG or WebP; required by most models"
    )
    steering = parser.add_mutually_exclusive_group()
    steering.add_argument(
        "--camera-path", "-c", type=Path, help="directory with poses.npy and intrinsics.npy"
    )
    steering.add_argument(
        "--keys",
        default="w*9",
        help="keys held in each latent frame, for example 'w*6 wl*3 -' (default: w*9)",
    )
    steering.add_argument(
        "--actions", help="actions of each latent frame, for example 'w*6 w+jump yaw=0.1*3 -'"
    )
    parser.add_argument(
        "--prompt",
        "-p",
        help=f"scene prompt (default: {DEFAULT_PROMPT!r}, if the model takes one)",
    )
    parser.add_argument(
        "--server",
        "-s",
        default="ws://127.0.0.1:8000",
        help="ws:// or wss:// address of the server",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        help="default: the variable VLLM_API_KEY",
    )
    parser.add_argument("--session-id", help="continue this session (default: a new one)")
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("world.mp4"), help=".mp4, or .npy for raw frames"
    )
    parser.add_argument("--width", type=int, help="default: the server's")
    parser.add_argument("--height", type=int, help="default: the server's")
    parser.add_argument("--fps", type=float, help="default: the model's")
    parser.add_argument("--num-frames", type=int, help="poses per call (default: all in one call)")
    parser.add_argument(
        "--num-calls", type=int, default=1, help="consecutive calls of the session (default: 1)"
    )
    parser.add_argument(
        "--frames-per-chunk", type=int, help="frames per message (default: a whole chunk)"
    )
    parser.add_argument(
        "--codec",
        default="mp4",
        choices=("mp4", "jpeg", "ndarray_u8", "ndarray_f32"),
        help="frames on the wire",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--retry-s",
        type=float,
        default=180.0,
        help="seconds to wait for a server that is restarting (default: 180)",
    )
    parser.set_defaults(query="")
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


def walk(args: argparse.Namespace, console: Console) -> tuple[np.ndarray, float]:
    """Send all requests, and return uint8 frames `[T, H, W, 3]` and their frame rate. Raises
    WorldError.
    """
    parts: list[np.ndarray] = []
    fps = args.fps or 16.0
    session_id = args.session_id or f"walk-{uuid.uuid4().hex}"
    console.print(f"session {session_id}", highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("messages"),
    )
    camera = read_camera(args.camera_path) if args.camera_path is not None else None
    used = 0
    next_chunk = 0 if args.session_id is None else None
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for number in range(args.num_calls):
            steering = steer(args, camera, used)
            if steering is None:
                break
            request: dict[str, Any] = {
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
            task = progress.add_task(f"call {number + 1}", total=None)
            arrived_s = time.monotonic()
            try:
                for message in responses(args, request, console):
                    progress.update(task, total=message["total"], completed=message["index"] + 1)
                    now_s = time.monotonic()
                    progress.console.print(describe(message, now_s - arrived_s), soft_wrap=True)
                    arrived_s, fps = now_s, message["fps"]
                    parts.append(frames_of(message))
                    used += len(parts[-1])
                    next_chunk = message["chunk_index"] + 1
            except BaseException:
                # Hide a progress bar that shows no progress, because it would look unfinished above
                # the error.
                progress.update(task, visible=progress.tasks[task].completed > 0)
                raise
    return np.concatenate(parts), fps


def extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the user has set. The server uses its defaults for all others."""
    named = {
        name: getattr(args, name) for name in ("width", "height", "fps", "frames_per_chunk", "seed")
    }
    policy = {
        "video_format": args.codec,
        "pose_policy": "hold_last" if args.camera_path is None else "trim",
    }
    return {**{name: value for name, value in named.items() if value is not None}, **policy}


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
        return {
            "actions": parse_keys(args.keys)
            if args.actions is None
            else parse_actions(args.actions)
        }
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
    next_frame: int | None = None
    first_chunk: int | None = request.get("chunk_index")
    attempt, has_moved = 0, False
    while attempt <= MAX_RECONNECTS:
        try:
            with (
                reopen_world(args, attempt) if attempt and not has_moved else open_world(args)
            ) as world:
                has_moved = False
                hello = decode(bytes(world.recv())).value
                request = {**request, **prompt_of(args, hello)}
                world.send(encode(request))
                while True:
                    message = receive(world)
                    if message["type"] == "done":
                        return
                    if message["type"] == "moved":
                        follow(args, message)
                        console.print(f"the session moves to the server {message['server']}")
                        has_moved, chunk = True, message["next_chunk_index"]
                        first = chunk if first_chunk is None else first_chunk
                        rest = rest_of({**request, "chunk_index": first}, chunk, hello)
                        if rest is None:
                            return
                        request, first_chunk = rest, chunk
                        break
                    if message["type"] == "error":
                        if attempt and message["code"] == "out_of_order":
                            rest = rest_of(request, message["expected"], hello)
                            if rest is None:
                                return
                            request, first_chunk = rest, message["expected"]
                            console.print(
                                "the server continues from its snapshot, chunk "
                                f"{message['expected']}"
                            )
                            world.send(encode(request))
                            continue
                        if args.image is None and message["code"] in (
                            "missing_image",
                            "session_evicted",
                        ):
                            retained = (
                                f" has no session {args.session_id!r}: it was closed or "
                                "never started"
                            )
                            raise WorldError(
                                f"{args.server}{retained if args.session_id else ' needs a start image'}; "  # noqa: E501
                                "start one with --image"
                            )
                        raise WorldError(f"{message['code']}: {message['message']}")
                    if message["type"] == "frame" and (
                        next_frame is None or message["first_frame"] >= next_frame
                    ):
                        next_frame = message["first_frame"] + message["num_frames"]
                        first_chunk = message["chunk_index"] if first_chunk is None else first_chunk
                        yield message
        except ConnectionClosed as error:
            console.print(f"connection lost ({error}); trying again")
            attempt += 1
    raise WorldError(f"{args.server} went away {MAX_RECONNECTS + 1} times")


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
    rest.pop("image", None)
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
    if "url" in moved:
        args.server, args.query = moved["url"].replace("http", "ws", 1), ""
    else:
        args.query = "?" + urlencode({"server": moved["server"], "session": moved["session_id"]})


def open_world(args: argparse.Namespace) -> ClientConnection:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        return connect(
            args.server.rstrip("/") + PATH + args.query,
            max_size=None,
            compression=None,
            additional_headers=headers,
            proxy=websocket_proxy(args.server),
        )
    except InvalidHandshake as error:
        is_for_good = isinstance(error, InvalidStatus) and error.response.status_code < 500
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
        attempt: Number of this reconnection, starting at 1. The pause before the first try doubles
            with each reconnection.

    Raises:
        WorldError: The server did not accept a connection in time.
    """
    give_up_s = time.monotonic() + args.retry_s
    pause_s = FIRST_PAUSE_S * 2 ** (attempt - 1)
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
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s, left_s)


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
