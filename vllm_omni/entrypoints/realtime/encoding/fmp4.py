# SPDX-License-Identifier: Apache-2.0
"""Fragmented MP4 for live streams: each chunk becomes one fragment that a browser can append.

`FragmentEncoder` returns an initialization segment once and a media fragment (`moof` + `mdat`) for
every chunk. The concatenation of the segments is a playable file. With Media Source Extensions, any
sequence of consecutive fragments can be played after the initialization segment, because each
fragment starts with a key frame and has its own timestamp.

A single FFmpeg muxer for the whole stream is not possible because it would have to flush a fragment
after each chunk, and PyAV has no function for that. FFmpeg therefore writes each chunk as a
separate file, from which this module extracts the boxes.
"""

import io
from collections.abc import Iterator
from typing import Final

import av
import numpy as np

from vllm_omni.entrypoints.media.mp4 import add_stream, check_frames, encode_frames, frame_rate
from vllm_omni.entrypoints.realtime.encoding.frames import (
    EncodedPart,
    StampedFrames,
    StatelessEncoder,
)

# T frames, H height, W width, C = 3 channels (RGB)

_MOVFLAGS: Final = "empty_moov+default_base_moof+frag_discont+cmaf"
_ENCODER: Final = {
    "crf": "18",
    "preset": "veryfast",
    "tune": "zerolatency",  # no B-frames, which would delay frames
    "threads": "4",  # one slice each; fixed, so all machines produce the same bytes
}


class FragmentEncoder(StatelessEncoder):
    """Encodes H.264 (yuv420p) fragments. Odd sides are padded by repeating the last row or column.

    After the initialization segment, a decoder can start at any fragment.

    Args:
        fps: Playback rate in frames per second, rounded to the closest fraction whose denominator
            is at most 1001.
    """

    def __init__(self, fps: float) -> None:
        self._rate = frame_rate(fps)
        self._num_fragments = 0
        self._init_segment: bytes | None = None

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        """Return one part that contains the bytes that continue the stream."""
        is_first = self._init_segment is None
        data = self.encode_fragment(frames.frames_THWC, frames.stamps[0].frame)
        _, height, width, _ = frames.frames_THWC.shape
        mime_type = self.mime_type if is_first else None
        return [EncodedPart(data, frames.stamps, width, height, mime_type=mime_type)]

    def encode_fragment(self, frames_THWC: np.ndarray, first_frame: int) -> bytes:
        """Return the bytes that continue the stream.

        The first call returns the initialization segment and a fragment. Later calls return only a
        fragment. Encoding takes a few milliseconds per frame at 480x832, so call this method on a
        worker thread.

        Args:
            frames_THWC: Frames, uint8 RGB, T >= 1, with the same H and W in every call.
            first_frame: Index of the first frame, which determines its timestamp.

        Raises:
            ValueError: The frame size differs from that of earlier frames.
        """
        check_frames(frames_THWC)
        self._num_fragments += 1
        init, media = [], []
        for kind, box in _boxes(self._mux(frames_THWC, first_frame)):
            if kind in (b"ftyp", b"moov"):
                init.append(box)
            elif kind in (b"moof", b"mdat"):
                media.append(box)
        segment = b"".join(init)
        if self._init_segment is None:
            self._init_segment = segment
            return b"".join([segment, *media])
        if segment != self._init_segment:
            raise ValueError("all frames of a stream must have the same size")
        return b"".join(media)

    @property
    def mime_type(self) -> str | None:
        """MIME type to pass to `MediaSource.addSourceBuffer`, or None before the first fragment."""
        if self._init_segment is None:
            return None
        profile = self._init_segment.index(b"avcC") + 5
        return f'video/mp4; codecs="avc1.{self._init_segment[profile : profile + 3].hex()}"'

    def _mux(self, frames_THWC: np.ndarray, first_frame: int) -> bytes:
        """Encode frames as a separate MP4 file, with timestamps and sequence numbers that continue
        those of the previous fragment.
        """
        buffer = io.BytesIO()
        options = {"movflags": _MOVFLAGS, "fragment_index": str(self._num_fragments)}
        with av.open(buffer, mode="w", format="mp4", options=options) as container:
            stream = add_stream(container, frames_THWC, self._rate, _ENCODER)
            encode_frames(container, stream, frames_THWC, first_frame)
            container.mux(stream.encode(None))
        return buffer.getvalue()


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the top-level boxes of an MP4 file, each as `(type, whole box)`."""
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 4])
        yield data[position + 4 : position + 8], data[position : position + size]
        position += size
