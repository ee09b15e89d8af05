# SPDX-License-Identifier: Apache-2.0
"""Clips that clients send, as arrays: decoded off the event loop, at the rate and length that the served model takes.

Held by tests/entrypoints/openai/test_openai_parts.py.
"""

import base64
import binascii
import io
from typing import Any, Final

import av
import numpy as np

from vllm_omni.entrypoints.media import as_displayed
from vllm_omni.entrypoints.openai.errors import invalid

_MAX_CLIP_SECONDS: Final = 600.0
_CLIP_SIDE: Final = 1024
"""Longest side in pixels that a clip's frames are sent to the engine with; models look at less."""

_MP4_BOXES: Final = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
"""First boxes of MP4 and QuickTime files; older MOV files have no `ftyp`."""


def is_clip(source: Any) -> bool:
    """Whether an upload says that it is a video: a `data:video/` URL, or it begins as MP4, MOV, WebM or AVI do."""
    if isinstance(source, str):
        return source.startswith("data:video/")
    return (
        source[4:8] in _MP4_BOXES or source[:4] == b"\x1aE\xdf\xa3" or (source[:4], source[8:12]) == (b"RIFF", b"AVI ")
    )


def read_clip(source: bytes | str, rate: float, most_frames: int, param: str) -> np.ndarray:
    """Decode a video, a file or a `data:` URL: at most `rate` frames a second, `most_frames` of them, evenly spread.

    Frames are as players show them (`as_displayed`). Returns uint8 [T, H, W, 3], T >= 1. Raises `ApiError` 400.
    """
    try:
        data = base64.b64decode(source.partition(",")[2], validate=True) if isinstance(source, str) else source
    except binascii.Error:
        raise invalid("the video is not valid base64", param, "invalid_video") from None
    try:
        count, seconds = _measure(data, param)
        wanted = max(1, min(count, most_frames, round(rate * seconds)))
        chosen = set(np.linspace(0, count - 1, wanted).astype(int).tolist())
        frames = []
        with av.open(io.BytesIO(data), mode="r") as container:
            stream = container.streams.video[0]
            for number, frame in enumerate(container.decode(stream)):
                if number in chosen:
                    frames.append(as_displayed(frame, stream, _CLIP_SIDE))
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise invalid(f"the file cannot be read as a video ({type(error).__name__})", param, "invalid_video") from None
    if not frames:
        raise invalid("the video holds no frames", param, "invalid_video")
    if len({frame.shape for frame in frames}) > 1:
        raise invalid("the video's frames change their size", param, "invalid_video")
    return np.stack(frames)


def _measure(data: bytes, param: str) -> tuple[int, float]:
    """Count a clip's frames by decoding it, and its seconds. Raises `ApiError` for a clip that is too long."""
    with av.open(io.BytesIO(data), mode="r") as container:
        fps = float(container.streams.video[0].average_rate or 12)
        count = 0
        for _ in container.decode(video=0):
            count += 1
            if count > fps * _MAX_CLIP_SECONDS:
                raise invalid(f"the clip is longer than {_MAX_CLIP_SECONDS:g} s", param, "video_too_long")
    if count == 0:
        raise invalid("the video holds no frames", param, "invalid_video")
    return count, count / fps
