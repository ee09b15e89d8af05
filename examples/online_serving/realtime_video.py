# SPDX-License-Identifier: Apache-2.0
"""Control a live stream of a world on a server, and save its frames as a video file.

    python examples/online_serving/realtime_video.py --image start.png --keys "w*12 wl*6" \\
        --chunks 6 --output live.mp4
    python examples/online_serving/realtime_video.py --image start.png \\
        --switch-prompt 3 "heavy rain" --chunks 8
    python examples/online_serving/realtime_video.py --image start.png --endpoint video \\
        --chunks 6 --output live.mp4

`--endpoint generate` (default) uses `/v1/realtime_video/generate`, which sends frames as images in
msgpack messages. `--endpoint video` uses `/v1/realtime/video`, which sends JSON and fragmented MP4.
The script writes the MP4 to the file as it arrives. `--keys` contains one token per latent frame,
which is 4 video frames. The w, a, s and d keys move the camera, i, k, j and l turn it, and `-`
means no key.
"""

import argparse
import base64
import io
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np
from PIL import Image
from rich.console import Console
from rich.markup import escape
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from vllm_omni.entrypoints.loopback import websocket_proxy
from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.entrypoints.realtime.controls.key_script import parse_actions, parse_keys

GENERATE_PATH = "/v1/realtime_video/generate"
VIDEO_PATH = "/v1/realtime/video"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Control a live stream of a server that runs `vllm serve --omni`."
    )
    parser.add_argument("--image", "-i", type=Path, help="start image: PNG, JPEG or WebP")
    parser.add_argument(
        "--prompt",
        "-p",
        default="A walk through a landscape, steady camera",
        help="scene prompt; '' for models without prompts",
    )
    parser.add_argument(
        "--keys",
        default="w*9",
        help="keys held in each latent frame, for example 'w*6 wl*3 -' (default: w*9)",
    )
    parser.add_argument("--actions", help="actions instead of keys: 'w*6 w+jump yaw=0.1*3 -'")
    parser.add_argument(
        "--switch-prompt",
        nargs=2,
        action="append",
        default=[],
        metavar=("CHUNK", "PROMPT"),
        help="change the prompt at about this chunk",
    )
    parser.add_argument(
        "--chunks", type=int, default=4, help="length of the stream in chunks (default: 4)"
    )
    parser.add_argument("--endpoint", choices=("generate", "video"), default="generate")
    parser.add_argument(
        "--format",
        choices=("jpeg", "webp", "raw", "delta-gzip"),
        default="jpeg",
        help="door generate",
    )
    parser.add_argument("--size", help="WIDTHxHEIGHT (default: the server's)")
    parser.add_argument("--seed", type=int, default=42)
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
    parser.add_argument("--output", "-o", type=Path, default=Path("live.mp4"))
    parser.set_defaults(query="")
    return parser


class StreamError(Exception):
    """The server refused the stream, or the stream ended early."""


class Moved(Exception):
    """The session continues on another server.

    Args:
        message: The server's message about the move.
    """

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__(message["message"])
        self.message = message


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.image is not None and not args.image.is_file():
        parser.error(f"--image: there is no file {args.image.absolute()}")
    console = Console(stderr=True)
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        frames = generate(args, console) if args.endpoint == "generate" else video(args, console)
    except (StreamError, OSError, ValueError, InvalidHandshake) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except ConnectionClosed as closed:
        reason = closed.rcvd.reason if closed.rcvd is not None else "the connection broke"
        console.print(
            f"[red]error:[/red] the server closed the stream: {escape(reason)}",
            highlight=False,
            soft_wrap=True,
        )
        return 1
    console.print(f"wrote {args.output}: {frames} frames")
    return 0


def open_endpoint(args: argparse.Namespace, path: str) -> ClientConnection:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        return connect(
            args.server.rstrip("/") + path + args.query,
            max_size=None,
            compression=None,
            additional_headers=headers,
            proxy=websocket_proxy(args.server),
        )
    except OSError as error:
        raise StreamError(
            f"no server answers at {args.server} ({error.strerror or error}); is it still starting?"
        ) from error


def follow(args: argparse.Namespace, moved: Moved, console: Console) -> str:
    """Set the address in `args` to the server that the session has moved to, and return the session
    id.

    If the message contains no address, a proxy at the current address finds the server by its name.
    """
    server, session_id = moved.message["server"], moved.message["session_id"]
    if "url" in moved.message:
        args.server, args.query = moved.message["url"].replace("http", "ws", 1), ""
    else:
        args.query = "?" + urlencode({"server": server, "session": session_id})
    console.print(f"the session moves to the server {server}")
    return str(session_id)


# -- /v1/realtime_video/generate -------------------------------------------------------------------


def generate(args: argparse.Namespace, console: Console) -> int:
    """Receive images, write them as one video, and return the number of frames."""
    init: dict[str, Any] = {
        "type": "init",
        "prompt": args.prompt,
        "seed": args.seed,
        "max_chunks": args.chunks,
        "realtime_output_format": args.format,
        "condition_inputs": {"camera_actions": parse_keys(args.keys)},
    }
    init["extensions"] = ["moves"]
    if args.actions is not None:
        init |= {
            "extensions": ["actions", "moves"],
            "condition_inputs": {"actions": parse_actions(args.actions)},
        }
    if args.image is not None:
        init["first_frame"] = args.image.read_bytes()
    if args.size is not None:
        init["size"] = args.size
    switches = {int(chunk): prompt for chunk, prompt in args.switch_prompt}
    parts: list[np.ndarray] = []
    events: list[dict[str, Any]] = []
    num_chunks = 0
    while num_chunks < args.chunks:
        with open_endpoint(args, GENERATE_PATH) as stream:
            # The server ignores an event whose id it has already seen.
            for message in (init, *events):
                stream.send(msgspec.msgpack.encode(message))
            try:
                for header, payload, stats in chunks(stream, args.chunks - num_chunks):
                    parts.extend(decode_frames(header, payload, parts[-1][-1] if parts else None))
                    if stats is None:
                        continue
                    console.print(
                        f"chunk {stats['chunk_index']}: {stats['num_frames']} frames in "
                        f"{stats['chunk_total_ms']} ms, "
                        f"{stats['ws_payload_bytes'] / 1e3:.0f} kB"
                    )
                    num_chunks = stats["chunk_index"] + 1
                    if (prompt := switches.pop(num_chunks, None)) is not None:
                        event = {"type": "event", "kind": "prompt", "event_id": num_chunks}
                        events.append({**event, "payload": prompt})
                        stream.send(msgspec.msgpack.encode(events[-1]))
            except Moved as moved:
                init["session_id"] = follow(args, moved, console)
    frames_THWC = np.concatenate(parts)
    args.output.write_bytes(encode_mp4(frames_THWC, 16.0))
    return len(frames_THWC)


def chunks(
    stream: ClientConnection, count: int
) -> Iterator[tuple[dict[str, Any], bytes, dict[str, Any] | None]]:
    """Yield frame messages as `(header, payload, None)`. In a chunk's last tuple, the chunk's
    statistics replace None.
    """
    last: tuple[dict[str, Any], bytes] | None = None
    while count:
        message = receive(stream)
        if message["type"] == "session":  # the first message if extensions are used
            continue
        if message["type"] == "error":
            raise StreamError(message.get("message", message["content"]))
        if message["type"] == "moved":
            raise Moved(message)
        if message["type"] == "chunk_stats":
            assert last is not None
            yield (*last, message)
            last, count = None, count - 1
            continue
        payload = message["payload"] if message["type"] == "frame_batch" else stream.recv()
        if last is not None:
            yield (*last, None)
        last = (message, payload)


def receive(stream: ClientConnection) -> dict[str, Any]:
    data = stream.recv()
    assert isinstance(data, bytes)
    message: dict[str, Any] = msgspec.msgpack.decode(data)
    return message


def decode_frames(
    header: dict[str, Any], payload: bytes, before: np.ndarray | None
) -> list[np.ndarray]:
    """Decode a frame message to a list that contains one uint8 array `[T, H, W, 3]`.

    Args:
        header: Header of the message.
        payload: Bytes of the frames.
        before: Last frame of the previous message, which a delta may refer to.
    """
    if "payload_lengths" in header:
        images, at = [], 0
        for length in header["payload_lengths"]:
            images.append(
                np.asarray(Image.open(io.BytesIO(payload[at : at + length])).convert("RGB"))
            )
            at += length
        return [np.stack(images)]
    is_delta = header["encoding"] == "delta-gzip"
    data = zlib.decompress(payload, 31) if is_delta else payload
    frames_THWC = (
        np.frombuffer(data, np.uint8).reshape(-1, header["height"], header["width"], 3).copy()
    )
    if is_delta:
        previous = before if header.get("delta_reference") == "previous-frame" else None
        for frame_HWC in frames_THWC:
            if previous is not None:
                frame_HWC ^= previous
            previous = frame_HWC
    return [frames_THWC]


# -- /v1/realtime/video ----------------------------------------------------------------------------


def video(args: argparse.Namespace, console: Console) -> int:
    """Write the MP4 fragments to the file as they arrive, and return the number of frames."""
    start: dict[str, Any] = {
        "type": "session.start",
        "prompt": args.prompt,
        "seed": args.seed,
        "extra_params": {"camera_action_script": parse_keys(args.keys)},
    }
    if args.actions is not None:
        start["extra_params"] = {"action_script": parse_actions(args.actions)}
    if args.image is not None:
        encoded = base64.b64encode(args.image.read_bytes()).decode()
        start["image_reference"] = {"image_url": f"data:image/png;base64,{encoded}"}
    if args.size is not None:
        start["width"], start["height"] = (int(side) for side in args.size.split("x"))
    switches = {int(chunk): prompt for chunk, prompt in args.switch_prompt}
    start["extra_params"]["follow_moves"] = True
    frames = number = 0
    waiting: dict[str, dict[str, Any]] = {}
    arrived_s = time.monotonic()
    with args.output.open("wb") as file:
        while True:
            with open_endpoint(args, VIDEO_PATH) as stream:
                for first in (start, *waiting.values()):  # and events not queued yet
                    stream.send(json.dumps(first))
                try:
                    while (message := receive_json(stream))["type"] != "session.done":
                        if message["type"] == "session.interaction.queued":
                            waiting.pop(message["event_id"], None)
                        if message["type"] != "video.chunk_metadata":
                            continue
                        data = stream.recv()
                        assert isinstance(data, bytes)
                        if message["generation_chunk_index"] >= args.chunks:
                            continue  # sent before the server had read `session.stop`
                        file.write(data)
                        frames += message["num_frames"]
                        number, now_s = message["generation_chunk_index"], time.monotonic()
                        console.print(
                            f"chunk {number}: {message['num_frames']} frames, "
                            f"{1000 * (now_s - arrived_s):.0f} ms"
                        )
                        arrived_s = now_s
                        if (prompt := switches.pop(number + 1, None)) is not None:
                            event_id = f"switch-{number}"
                            interaction = {"event_id": event_id, "event": {"prompt": prompt}}
                            waiting[event_id] = {
                                "type": "session.interaction",
                                "interaction": interaction,
                            }
                            stream.send(json.dumps(waiting[event_id]))
                        if number + 1 == args.chunks:
                            stream.send(json.dumps({"type": "session.stop"}))
                    return frames
                except Moved as moved:
                    start["extra_params"]["session_id"] = follow(args, moved, console)
                    if number + 1 >= args.chunks:
                        return frames


def receive_json(stream: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(stream.recv())
    if message["type"] == "error":
        raise StreamError(message["message"])
    if message["type"] == "session.moved":
        raise Moved(message)
    return message


if __name__ == "__main__":
    sys.exit(main())
