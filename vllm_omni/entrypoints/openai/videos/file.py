# SPDX-License-Identifier: Apache-2.0
"""Write the files of one video incrementally: the MP4, a thumbnail (WebP) and a sprite sheet
(JPEG).

All methods block, so call them on a worker thread.
"""

from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import Mp4Writer, contact_sheet

_SHEET_FRAMES: Final = 16
_STILL_WIDTH: Final = 320


class VideoFile:
    """Writes `<stem>.mp4`, `<stem>.webp` and `<stem>.jpg`.

    Args:
        stem: Path of the files, without a suffix. The file name may contain dots.
        fps: Frames per second.
        num_frames: Number of pixel frames in the whole video. This number determines which frames
            the sprite sheet shows.
    """

    def __init__(self, stem: Path, fps: float, num_frames: int) -> None:
        self._stem = stem
        self._writer = Mp4Writer(self._path(".mp4"), fps)
        count = min(_SHEET_FRAMES, num_frames)
        self._wanted = {
            round(number * (num_frames - 1) / max(1, count - 1)) for number in range(count)
        }
        self._stills: list[np.ndarray] = []
        self.num_frames = 0

    def write_frames(self, frames_THWC: np.ndarray) -> None:
        """Append frames, uint8 RGB `[T, H, W, 3]`."""
        self._writer.write_frames(frames_THWC)
        for offset in range(len(frames_THWC)):
            if self.num_frames + offset in self._wanted:
                self._stills.append(_still(frames_THWC[offset]))
        self.num_frames += len(frames_THWC)

    def finish(self) -> int:
        """Complete the files, and return their total size in bytes."""
        self._writer.close()
        Image.fromarray(self._stills[0]).save(self._path(".webp"), "WEBP", quality=80)
        contact_sheet(np.stack(self._stills)).save(self._path(".jpg"), "JPEG", quality=85)
        return sum(self._path(suffix).stat().st_size for suffix in (".mp4", ".webp", ".jpg"))

    def abandon(self) -> None:
        """Remove the files written so far. Idempotent."""
        self._writer.abandon()
        for suffix in (".mp4", ".webp", ".jpg"):
            self._path(suffix).unlink(missing_ok=True)

    def _path(self, suffix: str) -> Path:
        return self._stem.with_name(self._stem.name + suffix)


def _still(frame_HWC: np.ndarray) -> np.ndarray:
    image = Image.fromarray(np.ascontiguousarray(frame_HWC))
    image.thumbnail((_STILL_WIDTH, _STILL_WIDTH))
    return np.asarray(image)
