# SPDX-License-Identifier: Apache-2.0
"""Encode a finished chunk as one or more `/v1/realtime/world/camera` reply messages.

Encoding takes tens of milliseconds per chunk, so it runs on the executor's threads.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from vllm_omni.entrypoints.realtime.connection.codec import MessageDialect, encode
from vllm_omni.entrypoints.realtime.encoding.frames import StampedFrames
from vllm_omni.entrypoints.realtime.encoding.h264 import access_unit_fields
from vllm_omni.entrypoints.realtime.encoding.images import Mp4Encoder
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec
from vllm_omni.entrypoints.realtime.sessions.run import FinishedChunk

# T pixel frames, H height, W width, C = 3 channels (RGB)

_F32_FRAMES_PER_MESSAGE: Final = 4
_MAX_SCALED_SIDE: Final = 1280


@dataclass(frozen=True)
class FrameRenderer:
    """Encodes one request's frames."""

    codec: str
    """Encoding of a message's frames: `mp4` (a file), `jpeg` (a list of files), `h264` (one access
    unit), `ndarray_u8` (one array `[T, H, W, 3]`) or `ndarray_f32` (a list of arrays `[H, W, 3]`
    with values in [0, 1]).
    """
    fps: float
    """Playback rate in frames per second."""
    quality: int
    """JPEG quality, 1 to 100."""
    frames_per_message: int | None
    """Number of frames in each message. None: a whole chunk, or 4 frames for `ndarray_f32`, because
    its clients expect 4.
    """
    dialect: MessageDialect
    """Array dialect that the client uses."""
    with_mp4: bool = False
    """Whether to add an MP4 file of the frames to each reply, in the `mp4` field, for clients that
    display images and record video. Default: False.
    """
    mp4_scale: int = 1
    """Scale factor of the MP4 file. Default: 1."""
    key_frame: bool = False
    """Whether the first chunk of the request must start with a key frame. Default: False."""
    transfer_ms: float | None = None
    """Time in milliseconds that the client took to receive its previous chunk. None: the time is
    unknown.
    """

    def __call__(self, chunk: FinishedChunk) -> Iterator[bytes]:
        """Yield a chunk's messages. In each message, `index` and `total` refer to all of the
        request's messages.
        """
        frames = chunk.stamped_frames(self.fps)
        if len(frames) != chunk.sizes[chunk.number]:
            raise RuntimeError(
                f"the model returned {len(frames)} frames, {chunk.sizes[chunk.number]} were planned"
            )
        if chunk.number == 0:
            self._prepare(chunk)
        counts = [-(-size // self._step(size)) for size in chunk.sizes]
        base, total = sum(counts[: chunk.number]), sum(counts)
        for part, group in enumerate(frames.split(self._step(len(frames)))):
            yield self._message(chunk, group, base + part, total)

    def _prepare(self, chunk: FinishedChunk) -> None:
        """Apply the measurements that the client reported with the request."""
        if self.transfer_ms is not None:
            playing_s = len(chunk.result.frames_THWC) / self.fps
            chunk.encoders.note_arrival(self.transfer_ms / 1e3, playing_s)
        if self.key_frame:
            chunk.encoders.request_key_frame()

    def _step(self, chunk_frames: int) -> int:
        if self.codec == "h264":
            return 1
        default = _F32_FRAMES_PER_MESSAGE if self.codec == "ndarray_f32" else chunk_frames
        return min(self.frames_per_message or default, chunk_frames)

    def _message(
        self, chunk: FinishedChunk, frames: StampedFrames, index: int, total: int
    ) -> bytes:
        started_s = time.perf_counter()
        frames_THWC, stamp = frames.frames_THWC, frames.stamps[0]
        is_first, chunk_frames = stamp.frame == chunk.first_frame, len(chunk.result.frames_THWC)
        video = self._video(chunk, frames)
        if self.with_mp4 and self.codec != "h264":
            video["mp4"] = self._mp4(frames)
        elif self.with_mp4 and stamp.frame == chunk.first_frame + chunk_frames - 1:
            # Add one file for the whole chunk, because a file with a single frame is of little use.
            video["mp4"] = self._mp4(chunk.stamped_frames(self.fps))
        mux_ms = (time.perf_counter() - started_s) * 1e3
        message: dict[str, Any] = {
            "type": "frame",
            "session_id": chunk.session_id,
            "request_id": chunk.request_id,
            "chunk_id": chunk.chunk_index,
            "chunk_index": chunk.chunk_index,
            "index": index,
            "total": total,
            "final": index == total - 1,
            "num_frames": len(frames),
            "chunk_frames": chunk_frames,
            "first_frame": stamp.frame,
            "time_us": stamp.time_us,
            "fps": self.fps,
            "width": frames_THWC.shape[2],
            "height": frames_THWC.shape[1],
            "codec": self.codec,
            "timing": _timing(chunk, mux_ms),
            "prompt_applied": chunk.prompt_applied,
        }
        if stamp.input_id is not None:
            message["input_id"] = stamp.input_id
        if chunk.seed is not None:
            message["seed"] = chunk.seed
        if chunk.warnings and is_first:
            message["warnings"] = list(chunk.warnings)
        if is_first:
            message |= chunk.result.world_pose_fields
        return encode({**message, **video}, self.dialect)

    def _mp4(self, frames: StampedFrames) -> bytes | memoryview:
        frames_THWC = frames.frames_THWC
        scale = max(1, min(self.mp4_scale, _MAX_SCALED_SIDE // max(frames_THWC.shape[1:3])))
        larger_THWC = frames_THWC.repeat(scale, axis=1).repeat(scale, axis=2)
        (file,) = Mp4Encoder(self.fps).encode(StampedFrames(larger_THWC, frames.stamps))
        return file.data

    def _video(self, chunk: FinishedChunk, frames: StampedFrames) -> dict[str, Any]:
        """Return the message fields that depend on the codec."""
        match self.codec:
            case "h264":
                spec = EncoderSpec(codec="h264", fps=self.fps)
                (unit,) = chunk.encoders.encode(spec, frames)
                return {"video": unit.data, **access_unit_fields(unit)}
            case "mp4" | "jpeg":
                spec = EncoderSpec(codec=self.codec, fps=self.fps, quality=self.quality)
                files = [part.data for part in chunk.encoders.encode(spec, frames)]
                return {"video": files if self.codec == "jpeg" else files[0]}
            case "ndarray_u8":
                return {"video": np.ascontiguousarray(frames.frames_THWC)}
            case "ndarray_f32":
                frames_HWC = [
                    np.divide(frame_HWC, np.float32(255), dtype=np.float32)
                    for frame_HWC in frames.frames_THWC
                ]
                return {"video": frames_HWC}
        raise AssertionError(f"protocol.parse let codec {self.codec!r} through")


def _timing(chunk: FinishedChunk, mux_ms: float) -> dict[str, float]:
    """Return the time in milliseconds that each of a chunk's stages took.

    `queue_ms` is the time that the request spent in the engine's queue and in transit.
    """
    stages: dict[str, list[float]] = chunk.result.meta.get("timings_ms", {})
    spent_ms = {name: sum(times) for name, times in stages.items()}
    names = {"encode": "encode_ms", "steps": "denoise_ms", "decode": "decode_ms"}
    timing = {reported: spent_ms[name] for name, reported in names.items() if name in spent_ms}
    busy_ms = spent_ms.get("total", sum(timing.values()))
    timing |= {
        "queue_ms": max(0.0, chunk.result.wall_ms - busy_ms),
        "mux_ms": mux_ms,
        "total_ms": chunk.result.wall_ms + mux_ms,
    }
    return {name: round(value, 3) for name, value in timing.items()}
