# SPDX-License-Identifier: Apache-2.0
"""Encode frames as H.264 MP4 files (PyAV) and as contact sheets (Pillow).

The demo, the examples and the endpoints share this module. Frames are uint8 RGB `[T, H, W, 3]`
NumPy arrays. The same frames produce the same bytes on all machines with the same x264 version.
"""

import contextlib
import io
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, cast

import av
import numpy as np
from av.container import OutputContainer
from av.video.stream import VideoStream
from PIL import Image

# T frames, H height, W width, C = 3 channels (RGB)

_CODEC: Final = "libx264"
_ENCODER: Final = {
    # This rate factor is visually lossless. A 480x832 chunk of 12 frames takes about 100 kB.
    "crf": "20",
    "preset": "veryfast",  # a chunk must be encoded much faster than it plays
    # Macroblock-tree rate control is disabled. With AVX-512, x264 (core 165) computes it from
    # uninitialized memory, so about one file in a hundred differed. crf 20 without macroblock-tree
    # has the same quality as crf 18 with it.
    "x264-params": "mbtree=0",
    "threads": "4",  # fixed, because the number of threads changes the encoded bytes
}


def encode_mp4(frames_THWC: np.ndarray, fps: float) -> bytes:
    """Encode frames as a self-contained MP4 file (H.264, yuv420p). The index is at the start of the
    file, and the first frame is a key frame.

    Args:
        frames_THWC: Frames, uint8 RGB, T >= 1. yuv420p requires even sides. If a side is odd, the
            last row or column is repeated, so the video is one pixel larger.
        fps: Frames per second, > 0. It is rounded to a fraction whose denominator is at most 1001.

    Raises:
        ValueError: The frames have a wrong shape or dtype.
    """
    buffer = io.BytesIO()
    with av.open(
        buffer,
        mode="w",
        format="mp4",
        options={"movflags": "faststart"},
        # faststart re-reads the written bytes to move the index to the front
        io_open=lambda url, flags, options: io.BytesIO(buffer.getbuffer()),
    ) as container:
        stream = add_stream(container, frames_THWC, frame_rate(fps))
        encode_frames(container, stream, frames_THWC)
        container.mux(stream.encode(None))
    return buffer.getvalue()


class Mp4Writer:
    """Writes an MP4 file like `encode_mp4`, but in parts, so a long video requires little memory.

    All frames must have the same size. The file is complete after `close`. If a write fails, the
    original OSError is raised. After an exception, only `abandon` may be called.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self._fps = fps
        self._sink = _Sink(path)
        self._container = av.open(
            self._sink,
            mode="w",
            format="mp4",
            options={"movflags": "faststart"},
            # faststart copies the written data after the index
            io_open=lambda url, flags, options: path.open("rb"),
        )
        self._stream: VideoStream | None = None

    def write_frames(self, frames_THWC: np.ndarray) -> None:
        """Encode frames. Shape: uint8 RGB `[T, H, W, 3]`, T >= 1.

        Raises:
            ValueError: The frames are invalid (see `encode_mp4`), or their size differs from that
                of earlier frames.
        """
        if self._stream is None:
            self._stream = add_stream(self._container, frames_THWC, frame_rate(self._fps))
        encode_frames(self._container, self._stream, frames_THWC)
        self._sink.check()

    def close(self) -> None:
        """Finish the file. Idempotent."""
        try:
            if self._stream is not None:
                self._container.mux(self._stream.encode(None))
                self._stream = None
            self._sink.check()
            self._container.close()
        except av.FFmpegError:
            self._sink.check()
            raise
        self._sink.check()
        self._sink.close()

    def abandon(self) -> None:
        """Close an incomplete file. Idempotent, never raises."""
        self._stream = None
        with contextlib.suppress(av.FFmpegError, OSError):
            self._container.close()
        self._sink.close()


class _Sink:
    """File object for libav that hides write errors until `check` raises the first one.

    No data is written after an error. The errors are hidden, because libav would crash the process
    or never close the file if writing an MP4 header failed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the first error, if any."""
        if self._error is not None:
            raise self._error

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        try:
            while left and self._error is None:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._error = error
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def frame_rate(fps: float) -> Fraction:
    """Return a frame rate as the closest fraction whose denominator is at most 1001.

    Raises:
        ValueError: `fps` is not in (0, 1000].
    """
    if not 0 < fps <= 1000:
        raise ValueError(f"fps must be in (0, 1000], got {fps}")
    return Fraction(fps).limit_denominator(1001)


def add_stream(
    container: OutputContainer,
    frames_THWC: np.ndarray,
    rate: Fraction,
    options: dict[str, str] = _ENCODER,
) -> VideoStream:
    """Add an H.264 video stream (yuv420p) for frames of the given size."""
    check_frames(frames_THWC)
    stream = container.add_stream(_CODEC, rate=rate, options=options)
    _, height, width, _ = frames_THWC.shape
    stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
    return stream


def encode_frames(
    container: OutputContainer,
    stream: VideoStream,
    frames_THWC: np.ndarray,
    first_frame: int | None = None,
) -> None:
    """Encode frames. Odd sides are padded by repeating the last row or column.

    Args:
        container: The open file.
        stream: The container's video stream.
        frames_THWC: Frames, uint8 RGB.
        first_frame: Index of the first frame, which determines its timestamp. Default: the frames
            follow those already encoded.

    Raises:
        ValueError: The frames have a wrong shape or dtype.
    """
    check_frames(frames_THWC)
    _, height, width, _ = frames_THWC.shape
    if (height + height % 2, width + width % 2) != (stream.height, stream.width):
        raise ValueError(
            f"frames of {width}x{height} do not fit a video of {stream.width}x{stream.height}"
        )
    if height % 2 or width % 2:
        frames_THWC = np.pad(
            frames_THWC, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge"
        )
    rate = stream.average_rate
    assert rate is not None, "`add_stream` sets the rate"
    for number, frame_HWC in enumerate(frames_THWC):
        image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")
        if first_frame is not None:
            image.pts, image.time_base = first_frame + number, 1 / rate
        container.mux(stream.encode(image))


def decode_mp4(data: bytes) -> tuple[np.ndarray, float]:
    """Decode a video file. The frames are oriented as a video player would show them.

    Returns:
        `(frames_THWC, fps)`: uint8 RGB `[T, H, W, 3]` and frames per second.

    Raises:
        ValueError: The file is not a readable video.
    """
    try:
        with av.open(io.BytesIO(data), mode="r") as container:
            if not container.streams.video:
                raise ValueError("the file has no video stream")
            stream = container.streams.video[0]
            frames = [as_displayed(frame, stream) for frame in container.decode(stream)]
            rate = stream.average_rate
    except av.FFmpegError as error:
        raise ValueError(
            f"not a readable video file of {len(data)} bytes: {type(error).__name__}"
        ) from error
    if not frames or rate is None:
        raise ValueError("the video stream has no frames")
    return np.stack(frames), float(rate)


def as_displayed(
    frame: av.VideoFrame, stream: VideoStream, most_side: int | None = None
) -> np.ndarray:
    """Return a decoded frame as a video player would show it. Shape: uint8 RGB [H, W, 3].

    Phones store upright clips rotated, with a display matrix that describes rotation and mirroring.
    In addition, pixels may not be square. FFmpeg's decoders report the matrix and the pixel shape
    but apply neither. Rotations are rounded to the nearest quarter turn.

    Args:
        frame: A frame from the stream's decoder.
        stream: The video stream.
        most_side: Maximum width and height in pixels. Default: frames are not scaled.
    """
    ratio = float(stream.sample_aspect_ratio or 1)
    width, height = frame.width * max(1.0, ratio), frame.height * max(1.0, 1 / ratio)
    scale = 1.0 if most_side is None else min(1.0, most_side / max(width, height))
    pixels_HWC = frame.to_ndarray(
        format="rgb24", width=max(2, round(width * scale)), height=max(2, round(height * scale))
    )
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels_HWC
    # The matrix is (a, b, u), (c, d, v), (x, y, w). The stored point (p, q) is shown at (a p + c q,
    # b p + d q).
    a, b, _, c, d = np.frombuffer(bytes(cast("Any", matrix)), np.int32)[:5].astype(int).tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels_HWC, a, d = pixels_HWC.swapaxes(0, 1), c, b
    return np.ascontiguousarray(pixels_HWC[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def contact_sheet(frames_THWC: np.ndarray, columns: int = 4, gap: int = 4) -> Image.Image:
    """Return a contact sheet that shows the frames in reading order on a dark background.

    Args:
        frames_THWC: Frames to show, uint8 RGB, T >= 1.
        columns: Frames per row.
        gap: Space between frames in pixels.
    """
    check_frames(frames_THWC)
    if columns < 1 or gap < 0:
        raise ValueError(f"columns must be >= 1 and gap >= 0, got {columns} and {gap}")
    count, height, width, _ = frames_THWC.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    sheet = Image.new(
        "RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), (24, 24, 28)
    )
    for index, frame_HWC in enumerate(frames_THWC):
        row, column = divmod(index, columns)
        sheet.paste(
            Image.fromarray(frame_HWC), (gap + column * (width + gap), gap + row * (height + gap))
        )
    return sheet


def check_frames(frames_THWC: np.ndarray) -> None:
    """Check the dtype and the shape of frames.

    Raises:
        ValueError: The frames are not uint8 `[T, H, W, 3]`, or T, H or W is 0.
    """
    if (
        frames_THWC.dtype != np.uint8
        or frames_THWC.ndim != 4
        or frames_THWC.shape[3] != 3
        or frames_THWC.size == 0
    ):
        raise ValueError(
            f"frames must be a non-empty uint8 array [T, H, W, 3], got {frames_THWC.dtype} "
            f"{frames_THWC.shape}"
        )
