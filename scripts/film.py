# SPDX-License-Identifier: Apache-2.0
"""Convert the demo's video to the animation in the README and on the site's home page.

    vllm-omni demo --once
    python scripts/film.py demo.mp4

The second command writes docs/how_to/walk.webp, an animation that plays at the speed of the walk
and contains every second frame, enlarged three times. A second argument names a different output
file.
"""

import sys
from pathlib import Path

from PIL import Image

from vllm_omni.entrypoints.media.mp4 import decode_mp4

FILM = Path(__file__).parents[1] / "docs" / "how_to" / "walk.webp"
SCALE = 3
STEP = 2
QUALITY = 60
"""Quality of lossy WebP. With this value, the animation takes up less than half a megabyte."""


def main(video: Path, film: Path = FILM) -> int:
    frames_THWC, fps = decode_mp4(video.read_bytes())
    size = frames_THWC.shape[2] * SCALE, frames_THWC.shape[1] * SCALE
    first, *others = (
        Image.fromarray(frame_HWC).resize(size, Image.Resampling.BICUBIC)
        for frame_HWC in frames_THWC[::STEP]
    )
    first.save(
        film,
        save_all=True,
        append_images=others,
        duration=round(1000 * STEP / fps),
        loop=0,
        quality=QUALITY,
    )
    print(f"wrote {film}: {1 + len(others)} frames, {film.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
