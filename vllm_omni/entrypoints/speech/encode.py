# SPDX-License-Identifier: Apache-2.0
"""Incremental audio encoders. This module encodes PCM and WAV itself, and uses PyAV for MP3, Opus,
AAC and FLAC.

The concatenated output of an encoder is a valid file. The header of a streamed WAV file marks the
file's length as unknown.
"""

import io
import struct
from typing import Any, Protocol

import torch

_UNKNOWN = 0xFFFFFFFF
_PYAV = {
    "mp3": ("mp3", "libmp3lame", "s16p"),
    "opus": ("ogg", "libopus", "s16"),
    "aac": ("adts", "aac", "fltp"),
    "flac": ("flac", "flac", "s16"),
}
"""PyAV container, codec and sample format for each audio format."""

MEDIA_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
}


class SoundEncoder(Protocol):
    def feed(self, samples: torch.Tensor) -> bytes:
        """Encode fp32 samples in [-1, 1]. Shape: [S].

        Returns:
            The next bytes of the file, which may be empty.
        """

    def finish(self) -> bytes:
        """Return the remaining bytes of the file. The encoder cannot be used afterwards."""


def make_encoder(audio_format: str, sample_rate: int) -> SoundEncoder:
    """Return an encoder for an audio format.

    Raises:
        ValueError: The format is unknown. The error message lists the supported formats.
    """
    if audio_format in ("pcm", "pcm16"):
        return _Pcm()
    if audio_format == "wav":
        return _Wav(sample_rate)
    if audio_format in _PYAV:
        return _PyAV(audio_format, sample_rate)
    raise ValueError(f"audio format {audio_format!r} is unknown; known: {', '.join(MEDIA_TYPES)}")


def pcm16(samples: torch.Tensor) -> bytes:
    """Convert fp32 samples to little-endian 16-bit PCM."""
    return (samples.clamp(-1, 1) * 32767).round().to(torch.int16).numpy().astype("<i2").tobytes()


def wav_file(samples: torch.Tensor, sample_rate: int) -> bytes:
    """Return a complete WAV file whose header contains the file's length."""
    data = pcm16(samples)
    return _wav_header(sample_rate, len(data)) + data


def _wav_header(sample_rate: int, data_bytes: int) -> bytes:
    riff = _UNKNOWN if data_bytes == _UNKNOWN else data_bytes + 36
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", riff, b"WAVE")
        + form
        + struct.pack("<4sI", b"data", data_bytes)
    )


class _Pcm:
    def feed(self, samples: torch.Tensor) -> bytes:
        return pcm16(samples)

    def finish(self) -> bytes:
        return b""


class _Wav(_Pcm):
    def __init__(self, sample_rate: int) -> None:
        self._header = _wav_header(sample_rate, _UNKNOWN)

    def feed(self, samples: torch.Tensor) -> bytes:
        header, self._header = self._header, b""
        return header + pcm16(samples)

    def finish(self) -> bytes:
        header, self._header = self._header, b""
        return header


class _PyAV:
    def __init__(self, audio_format: str, sample_rate: int) -> None:
        import av

        container, codec, self._sample_format = _PYAV[audio_format]
        self._out = _Growing()
        self._container: Any = av.open(self._out, "w", format=container)
        self._stream: Any = self._container.add_stream(codec, rate=sample_rate, layout="mono")
        self._rate = sample_rate
        self._resampler = av.AudioResampler(
            format=self._sample_format, layout="mono", rate=sample_rate
        )

    def feed(self, samples: torch.Tensor) -> bytes:
        import av

        frame = av.AudioFrame.from_ndarray(
            samples.clamp(-1, 1).numpy()[None], format="flt", layout="mono"
        )
        frame.sample_rate = self._rate
        for converted in self._resampler.resample(frame):
            self._container.mux(self._stream.encode(converted))
        return self._out.take_bytes()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._out.take_bytes()


class _Growing(io.RawIOBase):
    """A write-only in-memory file. `take_bytes` removes and returns the bytes written so far."""

    def __init__(self) -> None:
        self._new = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._new += data
        return len(data)

    def take_bytes(self) -> bytes:
        data = bytes(self._new)
        self._new.clear()
        return data
