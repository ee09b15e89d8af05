# SPDX-License-Identifier: Apache-2.0
"""Decode clients' clips into arrays of frames, at a frame rate and length that the served model
accepts.
"""

import base64
import binascii
import io
from collections.abc import Callable
from typing import Any, Final

import av
import numpy as np

from vllm_omni.entrypoints.errors import ApiError, invalid
from vllm_omni.entrypoints.media.mp4 import as_displayed
from vllm_omni.entrypoints.realtime.connection.images import format_name

_MAX_CLIP_SECONDS: Final = 600.0
_CLIP_SIDE: Final = 1024
"""Maximum side length in pixels of the frames sent to the engine. Models use smaller frames.
"""

_MAX_FRAMES: Final = 36_000
_MAX_FRAME_PIXELS: Final = 4096 * 4096
_MAX_PIXELS: Final = 1 << 32
"""Maximum total number of pixels in all frames. The limit corresponds to 69 s of 1920x1080 video at
30 frames per second, which takes about ten seconds to decode on one core.
"""

_MP4_BOXES: Final = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
"""Box types that an MP4 or QuickTime file can start with. Older MOV files have no `ftyp` box."""


def is_clip(source: Any) -> bool:
    """Return whether an upload is a video, that is, a `data:video/` URL or a file that starts like
    a video container.

    AVIF and HEIC files also start like MP4 files, but they count as images.
    """
    if isinstance(source, str):
        return source.startswith("data:video/")
    if format_name(source) is not None:
        return False
    is_transport = len(source) > _TS_PACKET and source[0] == source[_TS_PACKET] == _TS_SYNC
    is_avi = (source[:4], source[8:12]) == (b"RIFF", b"AVI ")
    return source[4:8] in _MP4_BOXES or source.startswith(_CONTAINERS) or is_avi or is_transport


_CONTAINERS: Final = (
    b"\x1aE\xdf\xa3",
    b"FLV\x01",
    b"OggS",
    b"\0\0\x01\xba",
    b"0&\xb2u\x8ef\xcf\x11",
)
"""First bytes of Matroska and WebM, FLV, Ogg, MPEG program stream and ASF files."""
_TS_PACKET, _TS_SYNC = 188, 0x47
"""MPEG-TS packet size in bytes, and the value of each packet's first byte."""


class ClientDisconnectedError(Exception):
    """Raised when the client that sent a clip has disconnected."""


def read_clip(
    source: bytes | str,
    rate: float,
    most_frames: int,
    param: str,
    has_left: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """Decode a video file or `data:` URL into frames, and limit their rate and number.

    The frames are evenly spaced and oriented as in a video player (`as_displayed`). To limit the
    work, the clip's size and length are checked before it is decoded.

    Args:
        source: Bytes of a file, or a `data:` URL.
        rate: Maximum frame rate of the result in frames per second.
        most_frames: Maximum number of frames in the result.
        param: Name of the request field, for error messages.
        has_left: Function that returns whether the client has disconnected. It is called for every
            frame.

    Returns:
        The clip's frames, uint8 [T, H, W, 3], T >= 1.

    Raises:
        ApiError: Status 400 if the file is not a readable video, or if the clip is too long or too
            large.
        ClientDisconnectedError: `has_left` returned True.
    """
    try:
        data = (
            base64.b64decode(source.partition(",")[2], validate=True)
            if isinstance(source, str)
            else source
        )
    except binascii.Error:
        raise invalid("the video is not valid base64", param, "invalid_video") from None
    try:
        count, seconds = _measure(data, param, has_left)
        wanted = max(1, min(count, most_frames, round(rate * seconds)))
        chosen = set(np.linspace(0, count - 1, wanted).astype(int).tolist())
        frames, pixels_left = [], _MAX_PIXELS
        with av.open(io.BytesIO(data), mode="r") as container:
            stream = container.streams.video[0]
            # Frames may be larger than the file declares, so FFmpeg also limits their size. Each
            # clip is decoded on one core.
            stream.codec_context.options = {"max_pixels": str(_MAX_FRAME_PIXELS)}
            stream.codec_context.thread_count = 1
            for number, frame in enumerate(container.decode(stream)):
                if has_left():
                    raise ClientDisconnectedError
                pixels_left -= frame.width * frame.height
                if pixels_left < 0 or number >= _MAX_FRAMES:
                    raise _too_large(param)
                if number in chosen:
                    frames.append(as_displayed(frame, stream, _CLIP_SIDE))
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise invalid(
            f"the file cannot be read as a video ({type(error).__name__})", param, "invalid_video"
        ) from None
    if not frames:
        raise invalid("the video has no frames", param, "invalid_video")
    if len({frame.shape for frame in frames}) > 1:
        raise invalid("the video's frames change their size", param, "invalid_video")
    return np.stack(frames)


def _measure(data: bytes, param: str, has_left: Callable[[], bool]) -> tuple[int, float]:
    """Return a clip's number of frames and its length in seconds. The packets are counted but not
    decoded.

    Raises:
        ApiError: Status 400 if the clip is empty, too long or too large.
        ClientDisconnectedError: The client has disconnected.
    """
    with av.open(io.BytesIO(data), mode="r") as container:
        stream = container.streams.video[0]
        fps = float(stream.average_rate or 12)
        pixels = max(1, stream.width * stream.height)
        count = 0
        for packet in container.demux(stream):
            count += packet.size > 0
            if count > fps * _MAX_CLIP_SECONDS:
                raise invalid(
                    f"the clip is longer than {_MAX_CLIP_SECONDS:g} s", param, "video_too_long"
                )
            if count > _MAX_FRAMES or count * pixels > _MAX_PIXELS or pixels > _MAX_FRAME_PIXELS:
                raise _too_large(param)
            if has_left():
                raise ClientDisconnectedError
    if count == 0:
        raise invalid("the video has no frames", param, "invalid_video")
    return count, count / fps


def _too_large(param: str) -> ApiError:
    return invalid(
        f"the clip is too large: at most {_MAX_FRAMES} frames of {_MAX_FRAME_PIXELS} pixels, "
        f"{_MAX_PIXELS} pixels in all its frames; send a shorter or smaller one",
        param,
        "video_too_large",
    )
