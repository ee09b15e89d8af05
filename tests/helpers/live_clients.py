# SPDX-License-Identifier: Apache-2.0
"""Strict clients for the two streaming endpoints, and a msgpack decoder that accepts only what the
web page's decoder accepts.
"""

import io
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

WIDTH, HEIGHT = 48, 32

# A short timeout avoids a delay, because the library does not read while it is waiting for the
# server's close frame.
_QUICK: Any = {"close_timeout": 0.05}

_pack = msgspec.msgpack.Encoder().encode


def png(width: int = WIDTH, height: int = HEIGHT) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 7, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def webui_unpack(data: bytes) -> Any:
    """Decode msgpack as the web page does.

    Raises an error for negative integers, 64-bit integers, str32, map32 and ext.
    """
    value, end = _unpack(data, 0)
    assert end == len(data), "bytes follow the message"
    return value


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    lead, at = data[at], at + 1
    if lead < 0x80:
        return lead, at
    if lead < 0x90:
        return _unpack_map(data, at, lead & 15)
    if lead < 0xA0:
        return _unpack_list(data, at, lead & 15)
    if lead < 0xC0:
        return data[at : at + (lead & 31)].decode(), at + (lead & 31)
    constants = {0xC0: None, 0xC2: False, 0xC3: True}
    if lead in constants:
        return constants[lead], at
    sizes = {
        0xC4: 1,
        0xC5: 2,
        0xC6: 4,
        0xD9: 1,
        0xDA: 2,
        0xDC: 2,
        0xDD: 4,
        0xDE: 2,
        0xCC: 1,
        0xCD: 2,
        0xCE: 4,
    }
    if lead in (0xCA, 0xCB):
        width = 4 if lead == 0xCA else 8
        return struct.unpack(">f" if width == 4 else ">d", data[at : at + width])[0], at + width
    assert lead in sizes, f"the WebUI cannot read lead byte {lead:#x}"
    number, at = int.from_bytes(data[at : at + sizes[lead]]), at + sizes[lead]
    match lead:
        case 0xC4 | 0xC5 | 0xC6:
            return data[at : at + number], at + number
        case 0xD9 | 0xDA:
            return data[at : at + number].decode(), at + number
        case 0xDC | 0xDD:
            return _unpack_list(data, at, number)
        case 0xDE:
            return _unpack_map(data, at, number)
    return number, at


def _unpack_list(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(count):
        item, at = _unpack(data, at)
        items.append(item)
    return items, at


def _unpack_map(data: bytes, at: int, count: int) -> tuple[dict[str, Any], int]:
    items = {}
    for _ in range(count):
        key, at = _unpack(data, at)
        items[key], at = _unpack(data, at)
    return items, at


@dataclass
class Chunk:
    """One chunk as the client received it. `frames` returns the frames of raw formats, and `files`
    returns the encoded images of other formats.
    """

    index: int
    headers: list[dict[str, Any]]
    payloads: list[bytes]
    stats: dict[str, Any]

    @property
    def event_id(self) -> int | None:
        return self.headers[0].get("event_id")

    def frames(self) -> np.ndarray:
        parts: list[np.ndarray] = []
        for header, payload in zip(self.headers, self.payloads, strict=True):
            shape = (header["num_frames"], header["height"], header["width"], 3)
            if header["content_type"] == "application/x-raw-rgb-delta-gzip":
                deltas = np.frombuffer(zlib.decompress(payload, 31), np.uint8).reshape(shape).copy()
                before = (
                    parts[-1][-1] if header.get("delta_reference") == "previous-frame" else None
                )
                for frame in deltas:
                    if before is not None:
                        frame ^= before
                    before = frame
                parts.append(deltas)
            else:
                assert header["content_type"] == "application/x-raw-rgb"
                parts.append(np.frombuffer(payload, np.uint8).reshape(shape))
        return np.concatenate(parts)

    def files(self) -> list[bytes]:
        found = []
        for header, payload in zip(self.headers, self.payloads, strict=True):
            at = 0
            for length in header["payload_lengths"]:
                found.append(payload[at : at + length])
                at += length
            assert at == header["total_size"]
        return found

    def numbers(self) -> list[int]:
        """Return the frame numbers that the fake engine encoded in the frames."""
        return [int(frame[1, 1, 0]) for frame in self.frames()]


class GenerateClient:
    """A client of `/v1/realtime_video/generate` that behaves like the web page.

    A message of an unknown type fails the test. The message after a `frame_batch_header` is its
    payload.
    """

    def __init__(
        self, port: int, path: str = "/v1/realtime_video/generate", **options: Any
    ) -> None:
        self._connecting = connect(
            f"ws://127.0.0.1:{port}{path}", compression=None, max_size=None, **_QUICK, **options
        )
        self.connection: ClientConnection = self._connecting.__enter__()
        self._extra: list[dict[str, Any]] = []

    def __enter__(self) -> "GenerateClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connecting.__exit__(None, None, None)

    def send(self, message: Any) -> None:
        self.connection.send(message if isinstance(message, bytes | str) else _pack(message))

    def init(self, **fields: Any) -> None:
        message = {
            "type": "init",
            "prompt": "a path",
            "size": f"{WIDTH}x{HEIGHT}",
            "first_frame": png(),
            **fields,
        }
        self.send({key: value for key, value in message.items() if value is not None})

    def event(self, kind: str, payload: Any, event_id: int | None = None) -> None:
        self.send({"type": "event", "kind": kind, "payload": payload, "event_id": event_id})

    def state(self, *held: list[str], event_id: int | None = None) -> None:
        transitions = [
            {"actions": keys, "client_ts_ms": 1000.5 + number} for number, keys in enumerate(held)
        ]
        self.event("camera_actions", {"mode": "state", "transitions": transitions}, event_id)

    def receive(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Receive one message. If it is a header, its payload is stored under `payload`."""
        data = self.connection.recv(timeout=timeout_s)
        assert isinstance(data, bytes), f"text arrived: {data!r}"
        message = webui_unpack(data)
        assert message["type"] in self.known_types, message
        if message["type"] == "frame_batch_header":
            payload = self.connection.recv(timeout=timeout_s)
            assert isinstance(payload, bytes)
            assert len(payload) == message["total_size"]
            message["payload"] = payload
        return message

    known_types = frozenset({"frame_batch", "frame_batch_header", "chunk_stats", "error"})

    def error(self) -> str:
        message = self.receive()
        assert message["type"] == "error", message["type"]
        return message["content"]

    def chunk(self, timeout_s: float = 10.0) -> Chunk:
        """Receive the next chunk: its frame messages in order, then its statistics. Any other
        message fails the test.
        """
        headers: list[dict[str, Any]] = []
        payloads = []
        while True:
            message = self.receive(timeout_s)
            if message["type"] in self.skipped_types:
                self._extra.append(message)
                continue
            if message["type"] == "chunk_stats":
                break
            assert message["type"] in ("frame_batch", "frame_batch_header"), message
            payloads.append(message.pop("payload"))
            headers.append(message)
        assert [header["frame_batch_index"] for header in headers] == list(range(len(headers)))
        assert {header["num_frame_batches"] for header in headers} == {len(headers)}
        assert [header["is_final_frame_batch"] for header in headers] == [False] * (
            len(headers) - 1
        ) + [True]
        (index,) = {header["chunk_index"] for header in headers}
        assert index == message["chunk_index"]
        assert sum(header["num_frames"] for header in headers) == message["num_frames"]
        return Chunk(index, headers, payloads, message)

    skipped_types: frozenset[str] = frozenset()

    def close_code(self, timeout_s: float = 10.0) -> tuple[int, str]:
        """Read until the server closes the connection, and return `(code, reason)`. Code 1006 means
        that no close frame arrived.
        """
        try:
            while True:
                self.connection.recv(timeout=timeout_s)
        except ConnectionClosed as closed:
            return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd is not None else (1006, "")


class ExtendedClient(GenerateClient):
    """A client that enables the protocol extensions and collects the messages that they define."""

    known_types = GenerateClient.known_types | {
        *("session", "event_ack", "event_applied", "control_result", "pong", "world_poses")
    }
    skipped_types = frozenset({"event_ack", "event_applied", "world_poses"})

    def taken(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self._extra if message["type"] == kind]


class VideoClient:
    """A client of `/v1/realtime/video`."""

    def __init__(self, port: int, path: str = "/v1/realtime/video", **options: Any) -> None:
        self._connecting = connect(
            f"ws://127.0.0.1:{port}{path}", compression=None, max_size=None, **_QUICK, **options
        )
        self.connection: ClientConnection = self._connecting.__enter__()

    def __enter__(self) -> "VideoClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connecting.__exit__(None, None, None)

    def send(self, message: Any) -> None:
        self.connection.send(message if isinstance(message, bytes | str) else json.dumps(message))

    def receive(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Receive one message. The bytes that follow metadata are stored under `data`."""
        text = self.connection.recv(timeout=timeout_s)
        assert isinstance(text, str), "bytes without metadata"
        message = json.loads(text)
        if message["type"] == "video.chunk_metadata":
            message["data"] = self.connection.recv(timeout=timeout_s)
            assert isinstance(message["data"], bytes)
            assert len(message["data"]) == message["byte_length"]
        return message

    def request(self, message: Any) -> dict[str, Any]:
        self.send(message)
        return self.receive()

    def until(self, kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Read up to the next message of type `kind`. Return that message and the chunks before
        it.
        """
        chunks = []
        while (message := self.receive())["type"] != kind:
            assert message["type"] == "video.chunk_metadata", message
            chunks.append(message)
        return message, chunks

    close_code = GenerateClient.close_code
