# SPDX-License-Identifier: Apache-2.0
"""Convert a finished chunk to the `FrameMessage`s of `/v1/realtime_video/generate`.

A frame message is normally one msgpack map that contains the payload. If the payload is 64 KiB or
larger, it is sent as a separate WebSocket message after a header map. All frames except raw frames
are encoded on the executor's threads.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vllm_omni.entrypoints.realtime.controls.control_track import ControlSample
from vllm_omni.entrypoints.realtime.encoding.frames import EncodedPart, StampedFrames
from vllm_omni.entrypoints.realtime.encoding.h264 import access_unit_fields
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec
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
    "h264": "video/h264",
}
_IMAGE_CODECS: Final = ("webp", "jpeg")

_pack = msgspec.msgpack.Encoder().encode


class ChunkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `chunk_stats` that are known before the chunk is sent."""

    session_id: str
    """Session id."""
    request_id: str
    """Request id."""
    chunk_index: int
    """Index of the chunk within the session."""
    sample: ControlSample
    """Controls used to generate the chunk."""
    forward_ms: float
    """Time in milliseconds from the engine request to its result."""
    build_ms: float
    """Time in milliseconds spent on encoding the frames."""
    num_batches: int
    """Number of frame messages in the chunk."""
    num_frames: int
    """Number of pixel frames in the chunk."""
    raw_bytes: int
    """Total size of the uncompressed frames in bytes."""
    content_type: str
    """MIME type of the payload."""
    world_pose_fields: dict[str, Any]
    """Value of `ChunkResult.world_pose_fields` for the chunk."""


class FrameMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A frame message: one or two WebSocket messages that must be sent together."""

    parts: tuple[bytes | memoryview, ...]
    """WebSocket messages, in order."""
    num_bytes: int
    """Total size of the messages in bytes."""
    chunk_frames: int
    """Total number of pixel frames in the chunk."""
    is_first: bool
    """Whether this is the first frame message of the chunk."""
    is_new_event: bool
    """Whether this is the first chunk in which an event takes effect."""
    report: ChunkReport | None
    """Report on the chunk. None: this is not the last frame message of the chunk."""

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True)
class FrameBatcher:
    """Encodes the frames of one session as frame messages."""

    spec: EncoderSpec
    """Output format of the frames. Its codec must be a key in `_CONTENT_TYPES`."""

    def __call__(self, chunk: FinishedChunk) -> Iterator[FrameMessage]:
        """Yield a chunk's frame messages, in order."""
        started_s = time.perf_counter()
        frames_THWC = chunk.result.frames_THWC
        sample: ControlSample = chunk.controls.mark
        request_id = f"{chunk.session_id}_{chunk.chunk_index:032x}"
        groups = chunk.stamped_frames(self.spec.fps).split(self._frames_per_message)
        for index, group in enumerate(groups):
            payload, fields = self._payload(group, chunk.encoders.encode(self.spec, group))
            is_last = index == len(groups) - 1
            header: dict[str, Any] = {
                "type": "frame_batch",
                "request_id": request_id,
                "chunk_index": chunk.chunk_index,
                "content_type": _CONTENT_TYPES[self.spec.codec],
                "num_frames": len(group),
                "total_size": len(payload),
                **fields,
                "frame_batch_index": index,
                "num_frame_batches": len(groups),
                "is_final_frame_batch": is_last,
            }
            if sample.event_id is not None:
                header["event_id"] = sample.event_id
            parts = _message(header, payload)
            report = ChunkReport(
                session_id=chunk.session_id,
                request_id=request_id,
                chunk_index=chunk.chunk_index,
                sample=sample,
                forward_ms=chunk.result.wall_ms,
                build_ms=(time.perf_counter() - started_s) * 1e3,
                num_batches=len(groups),
                num_frames=len(frames_THWC),
                raw_bytes=frames_THWC.nbytes,
                content_type=_CONTENT_TYPES[self.spec.codec],
                world_pose_fields=chunk.result.world_pose_fields,
            )
            yield FrameMessage(
                parts=parts,
                num_bytes=sum(map(len, parts)),
                chunk_frames=len(frames_THWC),
                is_first=index == 0,
                is_new_event=sample.is_new,
                report=report if is_last else None,
            )

    @property
    def _frames_per_message(self) -> int:
        if self.spec.codec == "h264":
            return 1
        is_image = self.spec.codec in _IMAGE_CODECS
        return ENCODED_FRAMES_PER_MESSAGE if is_image else RAW_FRAMES_PER_MESSAGE

    def _payload(
        self, frames: StampedFrames, parts: list[EncodedPart]
    ) -> tuple[bytes | memoryview, dict[str, Any]]:
        """Return the payload and the header fields for one frame message. Raw frames are not
        copied.
        """
        frames_THWC = frames.frames_THWC
        _, height, width, channels = frames_THWC.shape
        fields: dict[str, Any] = {
            "format": "rgb24",
            "width": width,
            "height": height,
            "channels": channels,
            "bytes_per_frame": height * width * channels,
        }
        if self.spec.codec in _IMAGE_CODECS:
            fields |= {
                "format": self.spec.codec,
                "width": parts[0].width,
                "height": parts[0].height,
                "encoding": self.spec.codec,
                "source_width": width,
                "source_height": height,
                "preview_width": parts[0].width,
                "preview_height": parts[0].height,
                "payload_lengths": [len(part.data) for part in parts],
            }
            return b"".join(part.data for part in parts), fields
        (part,) = parts
        if self.spec.codec == "h264":
            stamp = part.stamps[0]
            fields |= {"format": "h264", "encoding": "h264", **access_unit_fields(part)}
            fields |= {"first_frame": stamp.frame, "time_us": stamp.time_us}
            return part.data, fields if stamp.input_id is None else {
                **fields,
                "input_id": stamp.input_id,
            }
        fields["raw_size"] = frames_THWC.nbytes
        fields["encoding"] = "raw" if self.spec.codec == "raw" else "delta-gzip"
        if not part.is_key:
            fields["delta_reference"] = "previous-frame"
        return part.data, fields


def _message(header: dict[str, Any], payload: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    if len(payload) < SEPARATE_FROM_BYTES:
        header["payload"] = payload
        return (_pack(header),)
    header["type"] = "frame_batch_header"
    return _pack(header), payload
