# SPDX-License-Identifier: Apache-2.0
"""Encoders for JPEG and WebP images, raw frames, lossless deltas and MP4 files.

JPEG has two implementations. `NvJpegEncoder` uses nvJPEG through torchvision because data-centre
GPUs have a JPEG engine or fast CUDA kernels for JPEG, but no NVENC. `ImageEncoder` uses Pillow.
"""

import io
import zlib
from typing import Any, Final

import numpy as np
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.entrypoints.realtime.encoding.frames import (
    EncodedPart,
    StampedFrames,
    StatelessEncoder,
)

# T frames, H height, W width, C = 3 channels (RGB)

_GZIP_LEVEL: Final = 1
_GZIP_WINDOW: Final = 31  # zlib's code for gzip framing


def shown_size(width: int, height: int, max_width: int | None) -> tuple[int, int]:
    """Return (width, height), scaled down to `max_width`. If `max_width` is None or 0, the size is
    not scaled.
    """
    if not max_width or width <= max_width:
        return width, height
    return max_width, max(1, round(height * max_width / width))


class ImageEncoder(StatelessEncoder):
    """Encodes each frame as a JPEG or WebP file with Pillow.

    Args:
        format: `jpeg` or `webp`.
        quality: Image quality, 1 to 100.
        max_width: Maximum width in pixels. Wider frames are scaled down. None or 0: no limit.
        full_chroma: Whether JPEG files retain the full colour resolution (4:4:4).
    """

    def __init__(
        self,
        format: str,
        quality: int,
        max_width: int | None = None,
        full_chroma: bool = False,
    ) -> None:
        self._format, self._max_width = format.upper(), max_width
        self._options: dict[str, Any] = {"quality": quality}
        if format == "webp":
            self._options["method"] = 0
        elif full_chroma:
            self._options["subsampling"] = 0

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        """Return one file per frame."""
        return [
            self._part(frame_HWC, frames.stamps[index : index + 1])
            for index, frame_HWC in enumerate(frames.frames_THWC)
        ]

    def _part(self, frame_HWC: np.ndarray, stamps: Any) -> EncodedPart:
        image = Image.fromarray(frame_HWC)
        width, height = shown_size(*image.size, self._max_width)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, self._format, **self._options)
        return EncodedPart(buffer.getvalue(), stamps, width, height)


class NvJpegEncoder(StatelessEncoder):
    """Encodes each frame as a JPEG file with nvJPEG, through torchvision. Requires CUDA.

    Args:
        quality: JPEG quality, 1 to 100.
    """

    def __init__(self, quality: int) -> None:
        self._quality = quality

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        """Return one file per frame. The frames are copied to the GPU in a single transfer."""
        import torch
        from torchvision.io import encode_jpeg

        _, height, width, _ = frames.frames_THWC.shape
        frames_TCHW = torch.from_numpy(np.ascontiguousarray(frames.frames_THWC)).cuda()
        frames_TCHW = frames_TCHW.permute(0, 3, 1, 2).contiguous()
        files = encode_jpeg(list(frames_TCHW), quality=self._quality)
        return [
            EncodedPart(
                file.cpu().numpy().tobytes(), frames.stamps[index : index + 1], width, height
            )
            for index, file in enumerate(files)
        ]


class RawEncoder(StatelessEncoder):
    """Returns a group of frames as raw pixels. Contiguous frames are not copied."""

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        _, height, width, _ = frames.frames_THWC.shape
        data = np.ascontiguousarray(frames.frames_THWC).reshape(-1).data
        return [EncodedPart(data, frames.stamps, width, height)]


class DeltaEncoder:
    """Compresses a group of frames as one gzip stream. Each frame is XORed with its predecessor.

    The first frame of a chunk is not XORed, so each chunk can be decoded independently.
    """

    def __init__(self) -> None:
        self._chunk_index: int | None = None
        self._reference_HWC: np.ndarray | None = None

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        """Return one part. Its `is_key` is True if its first frame is not XORed."""
        chunk_index = frames.stamps[0].chunk_index
        reference_HWC = self._reference_HWC if chunk_index == self._chunk_index else None
        is_key = reference_HWC is None
        compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
        data = []
        for frame_HWC in frames.frames_THWC:
            delta_HWC = frame_HWC if reference_HWC is None else frame_HWC ^ reference_HWC
            data.append(compressor.compress(delta_HWC.tobytes()))
            reference_HWC = frame_HWC
        assert reference_HWC is not None
        # Copy the frame, because a view would keep all frames of the chunk in memory.
        self._chunk_index, self._reference_HWC = chunk_index, reference_HWC.copy()
        _, height, width, _ = frames.frames_THWC.shape
        payload = b"".join([*data, compressor.flush()])
        return [EncodedPart(payload, frames.stamps, width, height, is_key)]

    def request_key_frame(self) -> None:
        """Make the next frame independent of its predecessor."""
        self._chunk_index = None

    def set_bitrate(self, bits_per_s: int) -> None:
        """Do nothing, because the encoding is lossless."""


class Mp4Encoder(StatelessEncoder):
    """Encodes a group of frames as a complete MP4 file.

    Args:
        fps: Playback rate in frames per second.
    """

    def __init__(self, fps: float) -> None:
        self._fps = fps

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        _, height, width, _ = frames.frames_THWC.shape
        data = encode_mp4(frames.frames_THWC, self._fps)
        return [EncodedPart(data, frames.stamps, width, height)]
