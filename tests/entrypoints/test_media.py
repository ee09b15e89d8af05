# SPDX-License-Identifier: Apache-2.0
"""Tests of MP4 encoding, MP4 decoding and contact sheets."""

import io
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from vllm_omni.entrypoints.media import encode_mp4
from vllm_omni.entrypoints.media.mp4 import Mp4Writer, contact_sheet, decode_mp4
from vllm_omni.entrypoints.realtime.encoding.fmp4 import FragmentEncoder


def moving_square(num_frames: int, height: int = 48, width: int = 64) -> np.ndarray:
    frames_THWC = np.zeros((num_frames, height, width, 3), np.uint8)
    for index in range(num_frames):
        frames_THWC[index, 8:24, 4 * index : 4 * index + 16] = (220, 60, 40)
    return frames_THWC


@pytest.mark.parametrize("num_frames", [1, 9, 12])
def test_every_frame_survives_the_round_trip(num_frames: int) -> None:
    """After encoding and decoding, all frames are present and in order, and differ from the
    originals only by H.264's loss.
    """
    frames_THWC = moving_square(num_frames)
    back_THWC, fps = decode_mp4(encode_mp4(frames_THWC, fps=16))
    assert back_THWC.shape == frames_THWC.shape
    assert fps == 16
    error = np.abs(back_THWC.astype(int) - frames_THWC.astype(int)).mean(axis=(1, 2, 3))
    # The tolerance allows for chroma being stored at half the resolution. A frame out of order
    # would differ by more than 10.
    assert error.max() < 6
    assert np.abs(frames_THWC[0].astype(int) - np.roll(frames_THWC[0], 16, axis=1)).mean() > 10


def test_the_index_is_in_front_and_the_first_frame_is_a_key_frame() -> None:
    """The index is at the front and the first frame is a key frame, so a browser can start playing
    before the file is complete.
    """
    data = encode_mp4(moving_square(9), fps=24)
    assert data[4:8] == b"ftyp"
    assert data.index(b"moov") < data.index(b"mdat")
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert next(container.demux(stream)).is_keyframe


def test_a_fractional_rate_survives() -> None:
    """A fractional frame rate, for example an NTSC rate with denominator 1001, survives encoding
    and decoding.
    """
    _, fps = decode_mp4(encode_mp4(moving_square(3), fps=30000 / 1001))
    assert fps == pytest.approx(30000 / 1001, abs=1e-9)


def test_odd_sides_are_padded_by_one() -> None:
    """An odd height or width is padded by repeating the last row or column, because yuv420p
    requires even sides.
    """
    back_THWC, _ = decode_mp4(encode_mp4(moving_square(2, 47, 63), fps=16))
    assert back_THWC.shape == (2, 48, 64, 3)


@pytest.mark.parametrize(
    ("a", "b", "c", "d", "corners"),
    [
        (1, 0, 0, 1, "RGBK"),
        (0, 1, -1, 0, "BRKG"),  # rotated clockwise by 90 degrees
        (-1, 0, 0, -1, "KBGR"),
        (0, -1, 1, 0, "GKRB"),
        (-1, 0, 0, 1, "GRKB"),  # mirrored, as some front cameras store it
        (1, 0, 0, -1, "BKRG"),
        (0, 1, 1, 0, "RBGK"),
    ],
)
def test_a_clip_is_read_as_players_show_it(a: int, b: int, c: int, d: int, corners: str) -> None:
    """When a phone's clip is read, its display matrix is applied, as in video players. The matrix
    rotates or mirrors the stored frames.
    """
    frame_HWC = np.zeros((48, 64, 3), np.uint8)
    frame_HWC[:24, :32, 0] = frame_HWC[:24, 32:, 1] = frame_HWC[24:, :32, 2] = 255
    data = bytearray(encode_mp4(frame_HWC[None], fps=16))
    matrix = data.find(b"tkhd") + 44  # box version 0
    data[matrix : matrix + 36] = struct.pack(
        ">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30
    )
    shown_HWC = decode_mp4(bytes(data))[0][0]
    height, width = shown_HWC.shape[:2]
    assert (height, width) == ((48, 64) if a else (64, 48))
    colours = {(True, False, False): "R", (False, True, False): "G", (False, False, True): "B"}
    seen = [shown_HWC[row, column] > 128 for row in (8, height - 8) for column in (8, width - 8)]
    assert "".join(colours.get(tuple(pixel.tolist()), "K") for pixel in seen) == corners


@pytest.mark.parametrize(
    ("ratio", "shape"), [(Fraction(4, 3), (48, 85)), (Fraction(1, 2), (96, 64))]
)
def test_pixels_that_are_not_square_are_stretched(ratio: Fraction, shape: tuple[int, int]) -> None:
    """Frames with a pixel aspect ratio other than 1:1 are stretched, as in video players."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.sample_aspect_ratio = ratio
        for packet in (*stream.encode(av.VideoFrame(64, 48, "yuv420p")), *stream.encode(None)):
            container.mux(packet)
    assert decode_mp4(buffer.getvalue())[0].shape[1:3] == shape


def test_equal_frames_make_equal_files(tmp_path: Path) -> None:
    """Equal frames produce bit-identical files, regardless of how the frames are split across calls
    and of what the memory contained before.

    With macroblock-tree rate control and AVX-512, one file in a hundred had different bytes. The
    test runs for more than a second, so it would also detect a creation time in the file.
    """
    noise = np.random.default_rng(0).integers(0, 32, (33, 96, 160, 3), dtype=np.uint8)
    frames_THWC = noise + 3 * np.arange(33, dtype=np.uint8)[:, None, None, None]
    sizes = np.random.default_rng(1)
    files = set()
    for number in range(25):
        garbage = [
            np.full(int(sizes.integers(1_000, 200_000)), number, np.uint8) for _ in range(20)
        ]
        del garbage
        path = tmp_path / f"{number}.mp4"
        writer = Mp4Writer(path, fps=16)
        for part_THWC in np.split(frames_THWC, np.sort(sizes.integers(1, 33, 3))):
            if len(part_THWC):
                writer.write_frames(part_THWC)
        writer.close()
        files |= {encode_mp4(frames_THWC, fps=16), path.read_bytes()}
    assert len(files) == 1
    streams = {FragmentEncoder(16.0).encode_fragment(frames_THWC[:9], 0) for _ in range(20)}
    assert len(streams) == 1


@pytest.mark.parametrize(
    "encode",
    [
        lambda frames: encode_mp4(frames, 16),
        lambda frames: FragmentEncoder(16).encode_fragment(frames, 0),
    ],
)
def test_files_do_not_depend_on_the_machine(encode: Callable[[np.ndarray], bytes]) -> None:
    """The encoder settings stored in the file do not depend on the number of cores or on any other
    machine property that is known to affect them.
    """
    settings = encode(np.zeros((1, 480, 832, 3), np.uint8))
    assert re.search(rb" threads=4 ", settings)
    assert re.search(rb" mbtree=0 ", settings)


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 8, 8, 3), np.float32),
        np.zeros((8, 8, 3), np.uint8),
        np.zeros((2, 8, 8, 4), np.uint8),
        np.zeros((0, 8, 8, 3), np.uint8),
    ],
)
def test_wrong_frames_are_refused(frames: np.ndarray) -> None:
    """Frames with the wrong shape are rejected with an error that states both the given and the
    allowed shape.
    """
    with pytest.raises(ValueError, match=r"frames must be .* \[T, H, W, 3\], got"):
        encode_mp4(frames, fps=16)
    with pytest.raises(ValueError, match=r"frames must be"):
        contact_sheet(frames)


def test_bytes_that_are_no_video_are_a_value_error() -> None:
    """Truncated files and files that are not videos raise ValueError instead of FFmpeg's
    exceptions.
    """
    data = encode_mp4(moving_square(3), fps=16)
    for broken in (b"", b"hello", data[:40]):
        with pytest.raises(ValueError, match=r"video"):
            decode_mp4(broken)


def test_contact_sheet_shows_frames_in_reading_order() -> None:
    """With two columns, a contact sheet shows the fourth frame in the second row and second
    column.
    """
    frames_THWC = np.stack([np.full((4, 6, 3), 50 * (i + 1), np.uint8) for i in range(4)])
    sheet = np.asarray(contact_sheet(frames_THWC, columns=2, gap=2))
    assert sheet.shape == (2 * 6 + 2, 2 * 8 + 2, 3)
    assert sheet[2, 2, 0] == 50
    assert sheet[2, 10, 0] == 100
    assert sheet[8, 2, 0] == 150
    assert sheet[8, 10, 0] == 200
