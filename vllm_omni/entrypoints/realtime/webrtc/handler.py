# SPDX-License-Identifier: Apache-2.0
"""Handler for a WebRTC client. It uses the `/v1/realtime/video` protocol, but sends the frames on a
video track.

The data channel carries the same messages as the WebSocket. Because the frames are sent on the
track, no binary message follows `video.chunk_metadata`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.websockets import WebSocket

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.chunk_source import ChunkControls, ChunkSpan
from vllm_omni.entrypoints.realtime.encoding.frames import EncodedPart
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec
from vllm_omni.entrypoints.realtime.sessions.run import FinishedChunk
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.video.handler import (
    CommandedSource,
    VideoClient,
    chunk_metadata,
)
from vllm_omni.entrypoints.realtime.webrtc.pacer import ChunkPacer

FORMAT: Final = "h264-track"
_AHEAD_FRAMES: Final = 2
"""Number of a chunk's frames that may still be waiting to be sent when the next chunk is delivered.
"""


class UnitTrack(Protocol):
    """Interface of a video track that sends access units at their playback times."""

    @property
    def buffered_s(self) -> float:
        """Time in seconds until playback requires another access unit."""
        ...

    async def put(self, units: Sequence[EncodedPart], ahead: int) -> None:
        """Queue access units. The call returns when at most `ahead` units are waiting to be
        sent.
        """
        ...


@dataclass(frozen=True)
class ChunkUnits:
    """The access units of one chunk."""

    metadata: dict[str, Any]
    """Contents of the `video.chunk_metadata` message."""
    units: list[EncodedPart]
    """Access units of the chunk, one per frame."""
    ready_s: float
    """Monotonic time in seconds when the last unit was encoded."""

    def __len__(self) -> int:
        return sum(len(unit.data) for unit in self.units)


class _UnitRenderer:
    """Encodes a session's chunks as H.264 access units, in order."""

    def __init__(self, fps: float, request_id: str) -> None:
        self._spec = EncoderSpec(codec="h264", fps=fps)
        self._request_id = request_id

    def __call__(self, chunk: FinishedChunk) -> list[ChunkUnits]:
        frames = chunk.stamped_frames(self._spec.fps)
        units = chunk.encoders.encode(self._spec, frames)
        num_bytes = sum(len(unit.data) for unit in units)
        metadata = chunk_metadata(chunk, self._request_id, frames.stamps, num_bytes)
        return [ChunkUnits(metadata, units, time.monotonic())]


class _PacedSource(CommandedSource):
    """Source that samples a chunk's controls only when the stream needs the chunk."""

    pacer: ChunkPacer

    @property
    def ready(self) -> bool:
        return self.pacer.is_time

    async def wait_until_ready(self) -> None:
        await self.pacer.wait_until_time()

    def sample(self, span: ChunkSpan) -> ChunkControls:
        self.pacer.note_request(span.num_frames)
        return super().sample(span)


class WebRtcClient(VideoClient):
    """Handler for one WebRTC client.

    Args:
        manager: Sessions of this process.
        websocket: Data channel, presented as a WebSocket.
        track: Video track that sends the frames.
    """

    endpoint = "realtime/webrtc"
    format = FORMAT

    source_class = _PacedSource

    def __init__(self, manager: SessionManager, websocket: WebSocket, track: UnitTrack) -> None:
        super().__init__(manager, websocket)
        self._track = track
        self._pacer: ChunkPacer | None = None

    def renderer(self, fps: float, request_id: str) -> _UnitRenderer:
        assert isinstance(self.source, _PacedSource)
        self._pacer = self.source.pacer = ChunkPacer(lambda: self._track.buffered_s, fps)
        return _UnitRenderer(fps, request_id)

    async def deliver(self, payload: ChunkUnits) -> None:
        """Send a chunk's metadata, and then its frames at their playback times."""
        await self.connection.send(self.next_metadata(payload.metadata))
        assert self._pacer is not None
        self._pacer.note_chunk(payload.ready_s)
        await self._track.put(payload.units, _AHEAD_FRAMES)

    async def send_error(self, error: EndpointError) -> None:
        if error.code == "moved":
            await self._track.put((), 0)  # send the last frames before the connection ends
        await super().send_error(error)

    def request_key_frame(self) -> None:
        """Make the next chunk start with a key frame."""
        if self.session is not None:
            self.session.encoders.request_key_frame()

    def set_bandwidth(self, bits_per_s: int) -> None:
        """Adapt the bitrate to the client's estimate of its bandwidth."""
        if self.session is not None:
            self.session.encoders.set_bandwidth(bits_per_s)
