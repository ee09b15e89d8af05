# SPDX-License-Identifier: Apache-2.0
"""The handler of one WebRTC client: the protocol of `/v1/realtime/video`, with a video track.

Messages of the data channel are the same as those of the WebSocket. Only the frames differ: they
are sent on the track, and `video.chunk_metadata` is not followed by a binary message.
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
"""Number of frames of a chunk that may still be waiting to be sent when the next chunk is
delivered.
"""


class UnitTrack(Protocol):
    """Sends access units at their playback times."""

    @property
    def buffered_s(self) -> float:
        """Time in seconds until playback needs another access unit."""
        ...

    async def put(self, units: Sequence[EncodedPart], ahead: int) -> None:
        """Queue access units. Return when at most `ahead` units are waiting to be sent."""
        ...


@dataclass(frozen=True)
class ChunkUnits:
    """The access units of one chunk."""

    metadata: dict[str, Any]
    """The message `video.chunk_metadata`."""
    units: list[EncodedPart]
    """One access unit per frame."""
    ready_s: float
    """Monotonic time in seconds at which the last unit was encoded."""

    def __len__(self) -> int:
        return sum(len(unit.data) for unit in self.units)


class _UnitRenderer:
    """Encodes a session's chunks as access units, in order."""

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
    """Samples controls when the stream needs its next chunk, and no earlier."""

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
    """One client.

    Args:
        manager: Sessions of this process.
        websocket: The data channel.
        track: Sends the frames.
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
        """Send the metadata, and then the frames at their playback times."""
        await self.connection.send(self.next_metadata(payload.metadata))
        assert self._pacer is not None
        self._pacer.note_chunk(payload.ready_s)
        await self._track.put(payload.units, _AHEAD_FRAMES)

    async def send_error(self, error: EndpointError) -> None:
        if error.code == "moved":
            await self._track.put((), 0)  # the last frames leave before the connection ends
        await super().send_error(error)

    def request_key_frame(self) -> None:
        """Start the next chunk with a key frame."""
        if self.session is not None:
            self.session.encoders.request_key_frame()

    def set_bandwidth(self, bits_per_s: int) -> None:
        """Adapt the bitrate to the client's estimate of its bandwidth."""
        if self.session is not None:
            self.session.encoders.set_bandwidth(bits_per_s)
