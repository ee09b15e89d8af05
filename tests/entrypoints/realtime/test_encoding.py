# SPDX-License-Identifier: Apache-2.0
"""Live video encoders: the frames that a client decodes, key frames, bitrate, and the choice of an
encoder when the server starts.
"""

import io
import zlib
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.entrypoints.realtime.encoding import implementations
from vllm_omni.entrypoints.realtime.encoding.frames import (
    EncodedPart,
    FrameStamp,
    StampedFrames,
    StatelessEncoder,
    stamped_frames,
)
from vllm_omni.entrypoints.realtime.encoding.h264 import (
    MAX_BITRATE,
    MIN_BITRATE,
    H264Encoder,
    codec_string,
)
from vllm_omni.entrypoints.realtime.encoding.implementations import (
    EncoderChoice,
    Implementations,
    choose,
    machine_implementations,
)
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec, SessionEncoders

FPS = 30.0
CPU = Implementations(EncoderChoice("h264", "libx264"), EncoderChoice("jpeg", "pillow"))


def scene(num_frames: int, height: int = 96, width: int = 160, first: int = 0) -> np.ndarray:
    """Return frames of a smooth image that moves by two pixels per frame."""
    y, x = np.mgrid[0:height, 0 : width + 2 * (first + num_frames)]
    wide_HWC = np.stack([128 + 100 * np.sin(x / 9), 128 + 90 * np.cos(y / 7), 60 + x % 130], -1)
    return np.stack(
        [
            wide_HWC[:, 2 * frame : 2 * frame + width].astype(np.uint8)
            for frame in range(first, first + num_frames)
        ]
    )


def stamped(
    frames_THWC: np.ndarray, first: int = 0, chunk: int = 0, input_id: str | None = None
) -> StampedFrames:
    return stamped_frames(
        frames_THWC, chunk_index=chunk, first_frame=first, fps=FPS, input_id=input_id
    )


def decode_h264(parts: list[EncodedPart]) -> np.ndarray:
    """Decode access units one at a time, as WebCodecs does. The decoder must return the frame of
    each access unit immediately.
    """
    decoder: Any = av.CodecContext.create("h264", "r")
    decoder.flags |= 1 << 19  # low delay
    decoder.thread_count = 1
    frames = []
    for part in parts:
        frames += decoder.decode(av.Packet(bytes(part.data)))
    frames += decoder.decode(None)
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])


def psnr_db(one: np.ndarray, other: np.ndarray) -> float:
    error = np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2)
    return float(10 * np.log10(255**2 / error))


def test_every_frame_has_chunk_number_time_and_newest_input() -> None:
    """Every encoded frame carries its chunk index, frame number, time and newest input. Frame n is
    n / fps seconds after the session's first frame.
    """
    frames = stamped(scene(2), first=9, chunk=1, input_id="key-7")
    assert frames.stamps == [
        FrameStamp(1, 9, 300_000, "key-7"),
        FrameStamp(1, 10, 333_333, "key-7"),
    ]
    encoder = H264Encoder("libx264", FPS)
    assert [part.stamps for part in encoder.encode(frames)] == [[stamp] for stamp in frames.stamps]


@pytest.mark.parametrize("codec", ["jpeg", "webp", "raw", "delta_gzip", "mp4", "fmp4", "h264"])
def test_every_codec_returns_the_frames(codec: Any) -> None:
    """The decoder that a codec's clients use returns the encoded frames. The tolerance is 36 dB for
    H.264, the quality for which its encoder is chosen, and 30 dB for images and files, because WebP
    and MP4 store colours at half the resolution. Lossless codecs return the original bytes.
    """
    frames_THWC = scene(4)
    encoders = SessionEncoders(lambda: CPU)
    parts = encoders.encode(EncoderSpec(codec=codec, fps=FPS), stamped(frames_THWC))
    assert [stamp.frame for part in parts for stamp in part.stamps] == [0, 1, 2, 3]
    assert {(part.width, part.height) for part in parts} == {(160, 96)}
    assert parts[0].is_key
    match codec:
        case "jpeg" | "webp":
            back = np.stack([np.asarray(Image.open(io.BytesIO(part.data))) for part in parts])
        case "raw":
            back = np.frombuffer(parts[0].data, np.uint8).reshape(frames_THWC.shape)
        case "delta_gzip":
            deltas = np.frombuffer(zlib.decompress(parts[0].data, 31), np.uint8)
            back = np.bitwise_xor.accumulate(deltas.reshape(frames_THWC.shape), axis=0)
        case "mp4" | "fmp4":
            back, fps = decode_mp4(bytes(parts[0].data))
            assert fps == FPS
        case "h264":
            back = decode_h264(parts)
    if codec in ("raw", "delta_gzip"):
        assert np.array_equal(back, frames_THWC)
    else:
        assert psnr_db(back, frames_THWC) >= (36 if codec == "h264" else 30)


def test_chunk_borders_need_no_key_frame() -> None:
    """In a stream of several chunks, only the first frame is a key frame, and the decoder returns
    the frame of each access unit immediately.
    """
    encoder = H264Encoder("libx264", FPS)
    frames_THWC = scene(33)
    parts = []
    for chunk, (first, count) in enumerate(((0, 9), (9, 12), (21, 12))):
        parts += encoder.encode(stamped(frames_THWC[first : first + count], first, chunk))
    assert [index for index, part in enumerate(parts) if part.is_key] == [0]
    assert psnr_db(decode_h264(parts), frames_THWC) >= 36


def test_a_decoder_can_join_at_a_requested_key_frame() -> None:
    """A decoder can start at a requested key frame without earlier access units, because the key
    frame contains the parameter sets.
    """
    encoder = H264Encoder("libx264", FPS)
    encoder.encode(stamped(scene(5)))
    encoder.request_key_frame()
    later_THWC = scene(5, first=5)
    parts = encoder.encode(stamped(later_THWC, first=5))
    assert [part.is_key for part in parts] == [True, False, False, False, False]
    assert codec_string(bytes(parts[0].data)) is not None
    assert codec_string(bytes(parts[1].data)) is None
    assert psnr_db(decode_h264(parts), later_THWC) >= 36


def test_the_profile_is_the_one_that_every_browser_decodes() -> None:
    """The stream has profile 0x42 (Baseline) with the flags 0xc0, which together mean Constrained
    Baseline. Every browser decodes Constrained Baseline.
    """
    (part,) = H264Encoder("libx264", FPS).encode(stamped(scene(1)))
    codec = codec_string(bytes(part.data))
    assert codec is not None
    assert codec.startswith("avc1.42c0")


def test_the_bitrate_changes_without_a_key_frame() -> None:
    """After the target bitrate of a noise stream is lowered, the actual bitrate falls from megabits
    to about the target within a second, without a key frame.
    """
    rng = np.random.default_rng(0)
    encoder = H264Encoder("libx264", FPS, 4_000_000)

    def second(number: int) -> list[EncodedPart]:
        frames_THWC = rng.integers(0, 255, (30, 192, 320, 3), dtype=np.uint8)
        return encoder.encode(stamped(frames_THWC, first=30 * number))

    seconds = [second(0), second(1)]
    encoder.set_bitrate(400_000)
    seconds += [second(number) for number in range(2, 5)]
    bits = [8 * sum(len(part.data) for part in parts) for parts in seconds]
    assert bits[1] > 3_000_000
    assert bits[-1] < 800_000
    assert sum(part.is_key for parts in seconds for part in parts) == 1


def test_the_bitrate_stays_within_its_limits() -> None:
    encoder = H264Encoder("libx264", FPS)
    encoder.set_bitrate(1)
    assert encoder.bits_per_s == MIN_BITRATE
    encoder.set_bitrate(1 << 40)
    assert encoder.bits_per_s == MAX_BITRATE


def test_odd_sides_and_a_new_size_are_encoded() -> None:
    """Frames with odd heights or widths are padded. A frame of a different size starts a new stream
    with a key frame.
    """
    encoder = H264Encoder("libx264", FPS)
    odd = encoder.encode(stamped(scene(2, 47, 63)))
    assert (odd[0].width, odd[0].height) == (64, 48)
    other = encoder.encode(stamped(scene(2, 32, 48), first=2))
    assert [part.is_key for part in other] == [True, False]
    assert decode_h264(other).shape == (2, 32, 48, 3)


def test_a_stream_continues_if_times_start_again() -> None:
    """A session that starts again encodes frame 0 twice. Its stream continues, although encoders
    require increasing timestamps.
    """
    encoder = H264Encoder("libx264", FPS)
    parts = encoder.encode(stamped(scene(3))) + encoder.encode(stamped(scene(3)))
    assert decode_h264(parts).shape == (6, 96, 160, 3)


def test_wrong_frames_are_refused() -> None:
    """Frames with a float dtype are rejected, because the encoded video would be noise."""
    with pytest.raises(ValueError, match="uint8"):
        H264Encoder("libx264", FPS).encode(stamped(scene(1).astype(np.float32)))


# -- sessions --------------------------------------------------------------------------------------


def test_a_session_keeps_its_encoder_until_it_starts_again() -> None:
    """Later chunks and requests of a session continue its encoder's stream. `reset` starts a new
    stream with a key frame.
    """
    encoders = SessionEncoders(lambda: CPU)
    spec = EncoderSpec(codec="h264", fps=FPS)
    first = encoders.encode(spec, stamped(scene(2)))
    second = encoders.encode(spec, stamped(scene(2, first=2), first=2, chunk=1))
    encoders.reset()
    third = encoders.encode(spec, stamped(scene(2)))
    assert [part.is_key for part in (*first, *second, *third)] == [
        *(True, False),
        *(False, False),
        *(True, False),
    ]


def test_a_session_holds_few_encoders() -> None:
    """A session holds only a few encoders. If a client requests many formats, the least recently
    used encoder is evicted.
    """
    encoders = SessionEncoders(lambda: CPU)
    for quality in range(1, 20):
        encoders.get(EncoderSpec(codec="jpeg", fps=FPS, quality=quality))
    assert len(encoders) == 4


# -- the choice at start ---------------------------------------------------------------------------


class FakeGpuEncoder(StatelessEncoder):
    """A simulated GPU encoder."""

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        return [EncodedPart(b"gpu", frames.stamps, 256, 256)]


class BrokenEncoder(StatelessEncoder):
    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        raise OSError("Cannot load libcuda.so.1\nmore lines")


def test_the_first_implementation_that_encodes_is_used() -> None:
    """The first implementation that can encode is used, and the report states in one line why a
    faster implementation is not used.
    """
    broken, fast = ("h264_nvenc", BrokenEncoder), ("libx264", FakeGpuEncoder)
    assert choose("h264", [broken, fast]) == EncoderChoice(
        "h264", "libx264", "h264_nvenc: Cannot load libcuda.so.1"
    )
    assert choose("h264", [("h264_nvenc", FakeGpuEncoder), fast]) == EncoderChoice(
        "h264", "h264_nvenc"
    )


def test_the_reason_has_no_arguments_of_ffmpeg() -> None:
    """The reported reason omits FFmpeg's arguments, although PyAV's errors contain the whole call
    with all encoder options.
    """
    call = "avcodec_open2(\"h264_nvenc\", {'preset': 'p4'})"

    def create() -> StatelessEncoder:
        raise av.error.PermissionError(1, "Operation not permitted", call)

    chosen = choose("h264", [("h264_nvenc", create), ("libx264", FakeGpuEncoder)])
    assert chosen.reason == "h264_nvenc: Operation not permitted"


def test_nvenc_is_used_where_it_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVENC is chosen if it can be opened. The test uses libx264 in place of NVENC, so NVENC itself
    is untested.
    """

    class FakeNvenc(H264Encoder):
        def __init__(self, implementation: Any, fps: float) -> None:
            super().__init__("libx264", fps)

    monkeypatch.setattr(implementations, "H264Encoder", FakeNvenc)
    machine_implementations.cache_clear()
    try:
        assert machine_implementations().h264 == EncoderChoice("h264", "h264_nvenc")
    finally:
        machine_implementations.cache_clear()


def test_nvjpeg_is_used_where_it_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvJPEG is chosen if it encodes. The test simulates the encoder, so nvJPEG itself is
    untested.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(implementations, "NvJpegEncoder", lambda quality: FakeGpuEncoder())
    machine_implementations.cache_clear()
    try:
        assert machine_implementations().jpeg == EncoderChoice("jpeg", "nvjpeg")
    finally:
        machine_implementations.cache_clear()


def test_a_machine_without_gpu_encodes_on_the_cpu() -> None:
    """On a machine without a GPU, the same encoder is chosen as on a machine whose GPU encoders are
    disabled.
    """
    off = machine_implementations(use_gpu=False)
    assert [choice.implementation for choice in off.choices] == ["libx264", "pillow"]
    assert all("VLLM_OMNI_GPU_ENCODERS" in choice.reason for choice in off.choices)
