# SPDX-License-Identifier: Apache-2.0
"""The encoder interface, which converts stamped frames to encoded parts.

A part is a unit that a client decodes as a whole: an image, an H.264 access unit, or a group of
frames (raw frames, deltas, an MP4 file, a fragment). Encoding blocks the caller, so it runs on a
thread of `ServerContext.threads` and never on the event loop. Encoders hold at most one frame
between calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

# T frames, H height, W width, C = 3 channels (RGB)

InputId = str | int
"""Id that a client assigned to an input: an event, an interaction or a request."""


class FrameStamp(msgspec.Struct, frozen=True):
    """Position of a frame, and the newest input that affected it."""

    chunk_index: int
    """Index of the chunk within the session, starting at 0."""
    frame: int
    """Index of the frame within the session, starting at 0."""
    time_us: int
    """Presentation time in microseconds, relative to the session's first frame."""
    input_id: InputId | None = None
    """Id of the newest input that affected the frame. None: no input affected it."""


@dataclass(frozen=True)
class StampedFrames:
    """Consecutive frames of one chunk, and a stamp for each frame."""

    frames_THWC: np.ndarray
    """Frames, uint8 RGB, T >= 1."""
    stamps: Sequence[FrameStamp]
    """Frame stamps, one per frame."""

    def __post_init__(self) -> None:
        assert len(self.stamps) == len(self.frames_THWC), "one stamp per frame"

    def __len__(self) -> int:
        return len(self.stamps)

    def split(self, num_frames: int) -> "list[StampedFrames]":
        """Split the frames into groups of `num_frames`. The last group may be smaller. The frames
        are not copied.
        """
        return [
            StampedFrames(
                self.frames_THWC[start : start + num_frames],
                self.stamps[start : start + num_frames],
            )
            for start in range(0, len(self), num_frames)
        ]


def stamped_frames(
    frames_THWC: np.ndarray,
    *,
    chunk_index: int,
    first_frame: int,
    fps: float,
    input_id: InputId | None,
) -> StampedFrames:
    """Return one chunk's frames with their stamps.

    Args:
        frames_THWC: Frames, uint8 RGB.
        chunk_index: Index of the chunk within the session.
        first_frame: Index of the first frame within the session.
        fps: Playback rate in frames per second.
        input_id: Id of the newest input that affected the chunk.
    """
    numbers = range(first_frame, first_frame + len(frames_THWC))
    return StampedFrames(
        frames_THWC,
        [FrameStamp(chunk_index, frame, round(frame * 1e6 / fps), input_id) for frame in numbers],
    )


@dataclass(frozen=True)
class EncodedPart:
    """An encoded part, which contains one or more frames."""

    data: bytes | memoryview
    """Encoded bytes. A memoryview shares the frames' memory."""
    stamps: Sequence[FrameStamp]
    """Stamps of the frames in the part, one per frame."""
    width: int
    """Width of the encoded frames in pixels."""
    height: int
    """Height of the encoded frames in pixels."""
    is_key: bool = True
    """Whether a decoder can start at this part."""
    mime_type: str | None = None
    """MIME type of the stream. None: the part does not start with the stream's initialization
    segment.
    """


class FrameEncoder(Protocol):
    """Encodes one stream's frames in order. Only one thread at a time may use an encoder."""

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        """Encode frames, and return the encoded parts.

        Raises:
            ValueError: The frames have an invalid shape or dtype, or their size differs from that
                of the stream's earlier frames.
        """
        ...

    def request_key_frame(self) -> None:
        """Make the next frame a key frame, so that a decoder can start there."""
        ...

    def set_bitrate(self, bits_per_s: int) -> None:
        """Set the target bitrate for all subsequent frames. Codecs without rate control ignore
        it.
        """
        ...


class StatelessEncoder:
    """Base class for encoders whose parts are independent of each other."""

    def request_key_frame(self) -> None:
        """Do nothing, because a decoder can start at every part."""

    def set_bitrate(self, bits_per_s: int) -> None:
        """Do nothing, because the codec has no rate control."""
