# SPDX-License-Identifier: Apache-2.0
"""Choose an implementation for each codec once at startup, based on what the machine supports.

Candidates are tried in order by encoding a small test frame, and the first one that succeeds is
used. `doctor` and `/omni/ready` report the chosen implementation and the reason for not using a
faster one.

NVENC has not been tested on a GPU, because data-centre GPUs such as the H100 and the H200 have no
NVENC. The code that selects NVENC is tested with a substitute encoder. nvJPEG was measured on an
H200.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from vllm_omni.entrypoints.realtime.encoding.frames import FrameEncoder, stamped_frames
from vllm_omni.entrypoints.realtime.encoding.h264 import H264Encoder, H264Implementation
from vllm_omni.entrypoints.realtime.encoding.images import ImageEncoder, NvJpegEncoder

_PROBE_SIDE: Final = 256  # NVENC rejects smaller frames
_PROBE_QUALITY: Final = 90


@dataclass(frozen=True)
class EncoderChoice:
    """The chosen implementation of one codec."""

    codec: str
    """Name of the codec: `h264` or `jpeg`."""
    implementation: str
    """Name of the implementation: `h264_nvenc` or `libx264` for H.264, `nvjpeg` or `pillow` for
    JPEG.
    """
    reason: str = ""
    """Reason why no faster implementation is used. Empty if the fastest implementation is used."""

    def __str__(self) -> str:
        return f"{self.codec}: {self.implementation}" + (f" ({self.reason})" * bool(self.reason))

    def as_json(self) -> dict[str, Any]:
        return {
            "codec": self.codec,
            "implementation": self.implementation,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Implementations:
    """The chosen implementation of each codec that has more than one."""

    h264: EncoderChoice
    """Implementation of H.264."""
    jpeg: EncoderChoice
    """Implementation of JPEG."""

    @property
    def choices(self) -> tuple[EncoderChoice, ...]:
        return self.h264, self.jpeg

    def create_h264(self, fps: float) -> H264Encoder:
        return H264Encoder(cast(H264Implementation, self.h264.implementation), fps)

    def create_jpeg(
        self, quality: int, max_width: int | None = None, full_chroma: bool = False
    ) -> FrameEncoder:
        """Return a JPEG encoder. If frames must be scaled down, the encoder uses Pillow.

        Args:
            quality: JPEG quality, 1 to 100.
            max_width: Maximum width in pixels. None or 0: no limit.
            full_chroma: Whether to retain the full colour resolution. nvJPEG always retains it.
        """
        if self.jpeg.implementation == "nvjpeg" and not max_width:
            return NvJpegEncoder(quality)
        return ImageEncoder("jpeg", quality, max_width, full_chroma)


Candidate = tuple[str, Callable[[], FrameEncoder]]


def choose(codec: str, candidates: Sequence[Candidate]) -> EncoderChoice:
    """Return the first candidate that can encode a frame. The last candidate is the fallback and is
    not tried.

    Args:
        codec: Codec name.
        candidates: Names and constructors of the implementations, fastest first.
    """
    frames = stamped_frames(
        np.zeros((1, _PROBE_SIDE, _PROBE_SIDE, 3), np.uint8),
        chunk_index=0,
        first_frame=0,
        fps=30.0,
        input_id=None,
    )
    reasons = []
    for name, create in candidates[:-1]:
        try:
            (part,) = create().encode(frames)
        # PyAV, torch and torchvision raise many exception types if a driver or device is missing.
        except Exception as error:
            reasons.append(f"{name}: {_first_line(error)}")
            continue
        if len(part.data):
            return EncoderChoice(codec, name, "; ".join(reasons))
        reasons.append(f"{name}: no data")
    return EncoderChoice(codec, candidates[-1][0], "; ".join(reasons))


@functools.cache
def machine_implementations(use_gpu: bool = True) -> Implementations:
    """Return the implementations to use on this machine. The first call may take seconds.

    Args:
        use_gpu: Whether to try NVENC and nvJPEG.
    """
    if not use_gpu:
        off = "the GPU is switched off (VLLM_OMNI_GPU_ENCODERS)"
        return Implementations(
            EncoderChoice("h264", "libx264", off), EncoderChoice("jpeg", "pillow", off)
        )
    return Implementations(
        h264=choose(
            "h264",
            [
                ("h264_nvenc", lambda: H264Encoder("h264_nvenc", 30.0)),
                ("libx264", lambda: H264Encoder("libx264", 30.0)),
            ],
        ),
        jpeg=choose(
            "jpeg",
            [
                ("nvjpeg", _nvjpeg),
                ("pillow", lambda: ImageEncoder("jpeg", _PROBE_QUALITY)),
            ],
        ),
    )


def _nvjpeg() -> FrameEncoder:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device")
    return NvJpegEncoder(_PROBE_QUALITY)


def _first_line(error: Exception) -> str:
    # PyAV's error messages also contain the call with all its arguments.
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
