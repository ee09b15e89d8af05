# SPDX-License-Identifier: Apache-2.0
"""`SessionEncoders`: owns one session's encoders, one for each requested output format.

A session's H.264 stream spans chunks and requests, so the encoder belongs to the session rather
than to a request.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from vllm_omni.entrypoints.realtime.encoding.bitrate import BitrateControl
from vllm_omni.entrypoints.realtime.encoding.fmp4 import FragmentEncoder
from vllm_omni.entrypoints.realtime.encoding.frames import EncodedPart, FrameEncoder, StampedFrames
from vllm_omni.entrypoints.realtime.encoding.images import (
    DeltaEncoder,
    ImageEncoder,
    Mp4Encoder,
    RawEncoder,
)
from vllm_omni.entrypoints.realtime.encoding.implementations import Implementations

VideoCodec = Literal["jpeg", "webp", "raw", "delta_gzip", "mp4", "fmp4", "h264"]

_DEFAULT_QUALITY: Final = {"webp": 90, "jpeg": 95}
_MAX_ENCODERS: Final = 4
"""Maximum number of encoders per session. If a client requests more formats, the least recently
used encoder is dropped.
"""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Output format that a client requests."""

    codec: VideoCodec
    """Output codec."""
    fps: float
    """Playback rate in frames per second."""
    quality: int | None = None
    """Quality of webp and jpeg files, 1 to 100. Default: 90 for webp and 95 for jpeg."""
    max_width: int | None = None
    """Maximum width of webp and jpeg files in pixels. Wider frames are scaled down. Default or 0:
    no limit.
    """
    full_chroma: bool = False
    """Whether jpeg files retain the full colour resolution. Default: False."""


class SessionEncoders:
    """One session's encoders. Only one thread at a time may call `encode`."""

    def __init__(self, implementations: Callable[[], Implementations]) -> None:
        """Initialize the object without any encoders.

        Args:
            implementations: Function that returns the codec implementations. It is called on the
                encoding thread.
        """
        self._implementations = implementations
        self._encoders: OrderedDict[EncoderSpec, FrameEncoder] = OrderedDict()
        self._bitrate = BitrateControl()
        self._chunk_index: int | None = None  # index of the newest chunk
        self._units: list[EncodedPart] = []  # access units of the newest chunk
        self._spent_s = 0.0  # time spent on encoding the newest chunk

    def __len__(self) -> int:
        return len(self._encoders)

    def encode(self, spec: EncoderSpec, frames: StampedFrames) -> list[EncodedPart]:
        """Encode frames in the requested format.

        Raises:
            ValueError: The frames have an invalid shape or dtype.
        """
        started_s = time.perf_counter()
        parts = self.get(spec).encode(frames)
        if frames.stamps[0].chunk_index != self._chunk_index:
            self._chunk_index = frames.stamps[0].chunk_index
            self._units, self._spent_s = [], 0.0
        self._spent_s += time.perf_counter() - started_s
        if spec.codec == "h264":
            self._units = [*self._units, *parts]
        return parts

    def units_of(self, frames: StampedFrames) -> list[EncodedPart] | None:
        """Return a chunk's access units, or None if the chunk is not the newest one or was not
        encoded as H.264.

        Args:
            frames: The chunk's frames.
        """
        units = self._units
        encoded = [unit.stamps[0].frame for unit in units]
        return units if encoded == [stamp.frame for stamp in frames.stamps] else None

    def get(self, spec: EncoderSpec) -> FrameEncoder:
        """Return the encoder for an output format, and create it if it does not exist."""
        encoder = self._encoders.get(spec)
        if encoder is None:
            encoder = self._encoders[spec] = self._create(spec)
            encoder.set_bitrate(self._bitrate.bits_per_s)
            while len(self._encoders) > _MAX_ENCODERS:
                self._encoders.popitem(last=False)
        else:
            self._encoders.move_to_end(spec)
        return encoder

    def request_key_frame(self) -> None:
        """Make the next frame of every stream a key frame because a client requires one."""
        for encoder in list(self._encoders.values()):
            encoder.request_key_frame()

    def note_transfer(self, transfer_s: float, playing_s: float) -> None:
        """Adapt the bitrate to the time that the client took to receive a chunk.

        Args:
            transfer_s: Time in seconds from the first to the last byte of the chunk.
            playing_s: The chunk's playing time in seconds.
        """
        self._bitrate.note_transfer(transfer_s, playing_s)
        self._apply_bitrate()

    def note_arrival(self, arrival_s: float, playing_s: float) -> None:
        """Adapt the bitrate to the time that the newest chunk took to arrive, as measured by the
        client.

        The first frames of a chunk are sent while later frames are encoded. The encoding time is
        therefore subtracted from the measured time.

        Args:
            arrival_s: Time in seconds from the first to the last message of the chunk.
            playing_s: The chunk's playing time in seconds.
        """
        self.note_transfer(max(0.0, arrival_s - self._spent_s), playing_s)

    def set_bandwidth(self, bits_per_s: int) -> None:
        """Adapt the bitrate to the client's own bandwidth estimate."""
        self._bitrate.set_bandwidth(bits_per_s)
        self._apply_bitrate()

    def _apply_bitrate(self) -> None:
        for encoder in list(self._encoders.values()):
            encoder.set_bitrate(self._bitrate.bits_per_s)

    def reset(self) -> None:
        """Drop all encoders because the session restarts. Each stream restarts with a key frame."""
        self._encoders = OrderedDict()
        self._chunk_index, self._units = None, []

    def _create(self, spec: EncoderSpec) -> FrameEncoder:
        match spec.codec:
            case "jpeg":
                quality = spec.quality or _DEFAULT_QUALITY["jpeg"]
                return self._implementations().create_jpeg(
                    quality, spec.max_width, spec.full_chroma
                )
            case "webp":
                quality = spec.quality or _DEFAULT_QUALITY["webp"]
                return ImageEncoder("webp", quality, spec.max_width)
            case "raw":
                return RawEncoder()
            case "delta_gzip":
                return DeltaEncoder()
            case "mp4":
                return Mp4Encoder(spec.fps)
            case "fmp4":
                return FragmentEncoder(spec.fps)
            case "h264":
                return self._implementations().create_h264(spec.fps)
