# SPDX-License-Identifier: Apache-2.0
"""Frame messages of `/v1/realtime_video/generate`: converts a finished chunk to `FrameMessage`s.

A message is one msgpack map that contains the payload. From 64 KiB on it is a header map, followed
by the payload as a separate WebSocket message. Encoding runs on the executor's threads, except for
raw frames.
"""

import io
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from PIL import Image

from vllm_omni.entrypoints.realtime.controls.control_track import ControlSample
from vllm_omni.entrypoints.realtime.sessions.run import FinishedChunk

# T frames, H height, W width, C = 3 channels (RGB)

SEPARATE_FROM_BYTES: Final = 64 * 1024
RAW_FRAMES_PER_MESSAGE: Final = 16
ENCODED_FRAMES_PER_MESSAGE: Final = 6

_CONTENT_TYPES: Final = {
    "raw": "application/x-raw-rgb",
    "delta_gzip": "application/x-raw-rgb-delta-gzip",
    "webp": "image/webp",
    "jpeg": "image/jpeg",
}
_DEFAULT_QUALITY: Final = {"webp": 90, "jpeg": 95}
_GZIP_LEVEL: Final = 1
_GZIP_WINDOW: Final = 31  # zlib's code for gzip framing

_pack = msgspec.msgpack.Encoder().encode


class ChunkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `chunk_stats` that are known before the chunk is sent."""

    session_id: str
    """Session id."""
    request_id: str
    """Request id."""
    chunk_index: int
    """Number of the chunk within the session."""
    sample: ControlSample
    """Controls of the chunk."""
    forward_ms: float
    """Time from the request to its result in milliseconds."""
    build_ms: float
    """Time to encode the frames in milliseconds."""
    num_batches: int
    """Number of frame messages."""
    num_frames: int
    """Number of pixel frames."""
    raw_bytes: int
    """Size of the uncompressed frames in bytes."""
    content_type: str
    """MIME type of the payload."""
    world_pose_fields: dict[str, Any]
    """As `ChunkResult.world_pose_fields`."""


class FrameMessage(msgspec.Struct, frozen=True, kw_only=True):
    """WebSocket messages that are sent together."""

    parts: tuple[bytes | memoryview, ...]
    """The messages."""
    num_bytes: int
    """Their total size in bytes."""
    chunk_frames: int
    """Pixel frames of the whole chunk."""
    is_first: bool
    """Whether this is the chunk's first message."""
    is_new_event: bool
    """Whether the chunk contains the first effect of an event."""
    report: ChunkReport | None
    """Report of the chunk, for its last message only."""

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True)
class FrameBatcher:
    """Encodes the frames of one session."""

    format: str
    """A key of `_CONTENT_TYPES`."""
    quality: int | None = None
    """Quality of webp and jpeg, 1 to 100. Default: 90 and 95."""
    preview_max_width: int | None = None
    """Maximum width of webp and jpeg in pixels; wider frames are scaled down. Default or 0: no
    limit."""

    def __call__(self, chunk: FinishedChunk) -> list[FrameMessage]:
        """Return the chunk's messages in order."""
        started_s = time.perf_counter()
        frames_THWC = chunk.result.frames_THWC
        sample: ControlSample = chunk.controls.mark
        request_id = f"{chunk.session_id}_{chunk.chunk_index:032x}"
        step = (
            ENCODED_FRAMES_PER_MESSAGE
            if self.format in _DEFAULT_QUALITY
            else RAW_FRAMES_PER_MESSAGE
        )
        starts = range(0, len(frames_THWC), step)
        messages = []
        for index, start in enumerate(starts):
            part_THWC = frames_THWC[start : start + step]
            payload, fields = self._payload(part_THWC, frames_THWC[start - 1] if start else None)
            header: dict[str, Any] = {
                "type": "frame_batch",
                "request_id": request_id,
                "chunk_index": chunk.chunk_index,
                "content_type": _CONTENT_TYPES[self.format],
                "num_frames": len(part_THWC),
                "total_size": len(payload),
                **fields,
                "frame_batch_index": index,
                "num_frame_batches": len(starts),
                "is_final_frame_batch": index == len(starts) - 1,
            }
            if sample.event_id is not None:
                header["event_id"] = sample.event_id
            messages.append(_message(header, payload))
        report = ChunkReport(
            session_id=chunk.session_id,
            request_id=request_id,
            chunk_index=chunk.chunk_index,
            sample=sample,
            forward_ms=chunk.result.wall_ms,
            build_ms=(time.perf_counter() - started_s) * 1e3,
            num_batches=len(starts),
            num_frames=len(frames_THWC),
            raw_bytes=frames_THWC.nbytes,
            content_type=_CONTENT_TYPES[self.format],
            world_pose_fields=chunk.result.world_pose_fields,
        )
        return [
            FrameMessage(
                parts=parts,
                num_bytes=sum(map(len, parts)),
                chunk_frames=len(frames_THWC),
                is_first=index == 0,
                is_new_event=sample.is_new,
                report=report if index == len(starts) - 1 else None,
            )
            for index, parts in enumerate(messages)
        ]

    def _payload(
        self, frames_THWC: np.ndarray, reference_HWC: np.ndarray | None
    ) -> tuple[bytes | memoryview, dict[str, Any]]:
        """Return one message's frames and their header fields. Raw frames are not copied."""
        _, height, width, channels = frames_THWC.shape
        fields: dict[str, Any] = {
            "format": "rgb24",
            "width": width,
            "height": height,
            "channels": channels,
            "bytes_per_frame": height * width * channels,
        }
        if self.format in _DEFAULT_QUALITY:
            shown_width, shown_height = self._preview_size(width, height)
            files = list(self._encoded(frames_THWC, (shown_width, shown_height)))
            sizes = {"source_width": width, "source_height": height}
            sizes |= {"preview_width": shown_width, "preview_height": shown_height}
            fields |= {
                "format": self.format,
                "width": shown_width,
                "height": shown_height,
                "encoding": self.format,
            }
            return b"".join(files), {
                **fields,
                **sizes,
                "payload_lengths": [len(file) for file in files],
            }
        fields["raw_size"] = frames_THWC.nbytes
        if self.format == "raw":
            fields["encoding"] = "raw"
            return np.ascontiguousarray(frames_THWC).reshape(-1).data, fields
        fields["encoding"] = "delta-gzip"
        if reference_HWC is not None:
            fields["delta_reference"] = "previous-frame"
        return _delta_gzip(frames_THWC, reference_HWC), fields

    def _preview_size(self, width: int, height: int) -> tuple[int, int]:
        if not self.preview_max_width or width <= self.preview_max_width:
            return width, height
        return self.preview_max_width, max(1, round(height * self.preview_max_width / width))

    def _encoded(self, frames_THWC: np.ndarray, size: tuple[int, int]) -> Iterator[bytes]:
        quality = self.quality or _DEFAULT_QUALITY[self.format]
        options = {"method": 0} if self.format == "webp" else {"subsampling": 0}
        for frame_HWC in frames_THWC:
            image = Image.fromarray(frame_HWC)
            if image.size != size:
                image = image.resize(size, Image.Resampling.BICUBIC)
            buffer = io.BytesIO()
            image.save(buffer, self.format.upper(), quality=quality, **options)
            yield buffer.getvalue()


def _delta_gzip(frames_THWC: np.ndarray, reference_HWC: np.ndarray | None) -> bytes:
    """Compress frames, each XOR its predecessor, as one gzip stream.

    Args:
        frames_THWC: Frames to compress.
        reference_HWC: Predecessor of the first frame. None: the first frame is not differenced.
    """
    compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    parts = []
    for frame_HWC in frames_THWC:
        delta_HWC = frame_HWC if reference_HWC is None else frame_HWC ^ reference_HWC
        parts.append(compressor.compress(delta_HWC.tobytes()))
        reference_HWC = frame_HWC
    return b"".join([*parts, compressor.flush()])


def _message(header: dict[str, Any], payload: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    if len(payload) < SEPARATE_FROM_BYTES:
        header["payload"] = payload
        return (_pack(header),)
    header["type"] = "frame_batch_header"
    return _pack(header), payload
