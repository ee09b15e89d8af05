# SPDX-License-Identifier: Apache-2.0
"""H.264 access units for live streams: one Annex-B access unit per frame, with no encoding delay.

Only the first frame and explicitly requested frames are key frames, so chunk boundaries cost no
additional bits. A key frame (IDR) contains its parameter sets, so a decoder can start at any key
frame. The bitrate may change at any frame.

The profile is Constrained Baseline because a single encoder serves all of a session's viewers, and
this is the only H.264 profile that WebRTC requires all browsers to support.
"""

from fractions import Fraction
from typing import Any, Final, Literal, cast

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import PictureType

from vllm_omni.entrypoints.media.mp4 import check_frames
from vllm_omni.entrypoints.realtime.encoding.frames import EncodedPart, FrameStamp, StampedFrames

# T frames, H height, W width, C = 3 channels (RGB)

H264Implementation = Literal["h264_nvenc", "libx264"]

MAX_BITRATE: Final = 8_000_000
"""Target bitrate in bits per second as long as the client keeps up with the stream."""
MIN_BITRATE: Final = 150_000
"""Lowest target bitrate in bits per second."""

_TIME_BASE: Final = Fraction(1, 1_000_000)
_NO_PERIODIC_KEY_FRAMES: Final = str((1 << 31) - 1)
_VBV_SHARE_OF_S: Final = 4  # a frame may use what the bitrate allows in a quarter of a second
_OPTIONS: Final[dict[H264Implementation, dict[str, str]]] = {
    "libx264": {
        "preset": "veryfast",
        "tune": "zerolatency",  # no B-frames and no look-ahead, which would delay frames
        "profile": "baseline",
        "forced-idr": "1",
        "sc_threshold": "0",  # no key frames at scene cuts, because key frames are large
        "g": _NO_PERIODIC_KEY_FRAMES,
        "qmin": "16",  # visually lossless; a calm scene then uses less than the target
        # sliced threads, because frame threads would delay frames; each slice costs some bits
        "threads": "2",
    },
    "h264_nvenc": {
        "preset": "p4",
        "tune": "ull",
        "profile": "baseline",
        "rc": "cbr",
        "forced-idr": "1",
        "zerolatency": "1",
        "delay": "0",
        "g": _NO_PERIODIC_KEY_FRAMES,
    },
}
# swscale converts the frames with the BT.601 matrix by default. If the stream does not declare
# BT.601, decoders assume another matrix for large frames.
_SMPTE170M: Final = 6
_LIMITED_RANGE: Final = 1


class H264Encoder:
    """Encodes one stream's frames as H.264. Odd sides are padded by repeating the last row or
    column.

    Args:
        implementation: FFmpeg's name for the encoder.
        fps: Playback rate in frames per second. Only rate control uses it, because timestamps come
            from the stamps.
        bits_per_s: Initial target bitrate in bits per second.
    """

    def __init__(
        self,
        implementation: H264Implementation,
        fps: float,
        bits_per_s: int = MAX_BITRATE,
    ) -> None:
        self._implementation, self._fps = implementation, fps
        self._bits_per_s = bits_per_s
        self._context: VideoCodecContext | None = None
        self._size: tuple[int, int] | None = None  # (height, width)
        self._last_us = -1
        self._needs_key = True

    @property
    def bits_per_s(self) -> int:
        """Target bitrate in bits per second."""
        return self._bits_per_s

    def request_key_frame(self) -> None:
        self._needs_key = True

    def set_bitrate(self, bits_per_s: int) -> None:
        self._bits_per_s = max(MIN_BITRATE, min(MAX_BITRATE, bits_per_s))

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        """Return one access unit per frame."""
        check_frames(frames.frames_THWC)
        size = frames.frames_THWC.shape[1:3]
        if self._context is None or size != self._size:
            self._size, self._needs_key, self._last_us = size, True, -1
            self._context = self._open(*size)
        # x264 accepts a new bitrate at every frame. The size of its VBV buffer does not change.
        self._context.bit_rate = self._bits_per_s
        return [
            self._encode_frame(self._context, frame_HWC, stamp)
            for frame_HWC, stamp in zip(frames.frames_THWC, frames.stamps, strict=True)
        ]

    def _open(self, height: int, width: int) -> VideoCodecContext:
        context = cast(VideoCodecContext, av.CodecContext.create(self._implementation, "w"))
        context.width, context.height = width + width % 2, height + height % 2
        context.pix_fmt = "yuv420p"
        context.time_base = _TIME_BASE
        context.framerate = Fraction(self._fps).limit_denominator(1001)
        context.bit_rate = self._bits_per_s
        context.colorspace = context.color_primaries = context.color_trc = _SMPTE170M
        context.color_range = _LIMITED_RANGE
        context.options = {
            **_OPTIONS[self._implementation],
            # The maximum equals the target because x264 can change the bitrate only if the stream
            # starts as CBR.
            "maxrate": str(self._bits_per_s),
            "bufsize": str(self._bits_per_s // _VBV_SHARE_OF_S),
        }
        context.open()
        return context

    def _encode_frame(
        self, context: VideoCodecContext, frame_HWC: np.ndarray, stamp: FrameStamp
    ) -> EncodedPart:
        height, width = frame_HWC.shape[:2]
        if height % 2 or width % 2:
            frame_HWC = np.pad(frame_HWC, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")
        # The encoder requires increasing timestamps, but the stamps restart when the session
        # restarts.
        self._last_us = stamp.time_us if stamp.time_us > self._last_us else self._last_us + 1
        image.pts, image.time_base = self._last_us, _TIME_BASE
        if self._needs_key:
            image.pict_type, self._needs_key = PictureType.I, False
        packets = context.encode(image)
        assert len(packets) == 1, f"{self._implementation} must not delay frames"
        return EncodedPart(
            bytes(packets[0]), [stamp], context.width, context.height, packets[0].is_keyframe
        )


def access_unit_fields(unit: EncodedPart) -> dict[str, Any]:
    """Return the message fields that a client needs to decode an access unit."""
    codec = codec_string(bytes(unit.data)) if unit.is_key else None
    return {"is_key_frame": unit.is_key} | ({} if codec is None else {"codec_string": codec})


def codec_string(access_unit: bytes) -> str | None:
    """Return the codec string of a stream for WebCodecs, for example `avc1.42c01f`.

    Args:
        access_unit: Access unit in Annex-B format. If it contains no sequence parameter set, the
            result is None.
    """
    at = access_unit.find(b"\x00\x00\x01\x67")
    if at < 0:
        return None
    return f"avc1.{access_unit[at + 4 : at + 7].hex()}"
