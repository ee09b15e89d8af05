# SPDX-License-Identifier: Apache-2.0
"""Runs the walk through the shipped village that the golden-video test compares with a recording.
When run as a script, this module makes the recording.

Record the walk again if the shipped weights change or if the frames are meant to change, and
mention this in the commit message:

    python tests/golden_video/village_walk.py
"""

import os
import sys
from pathlib import Path

import torch
from PIL import Image

# When this file is run as a script, Python must find the `training` package next to `tests`.
sys.path.insert(0, str(Path(__file__).parents[2]))

from training.tiny_world.play import EngineWorld, Played
from training.tiny_world.prompts import PROMPTS

GOLDEN = Path(__file__).parents[1] / "golden" / "village" / "walk.png"
HEIGHT, WIDTH = 96, 160
WALK = Played(
    (1.2, -4.0), 0.0, ("", "w", "w", "wl", "wl", "l", "j", "j", "w"), 0, {0: PROMPTS["day"][0]}, 7
)
"""Keys of three chunks across the square: forward, forward and right, back and left."""
KEPT_LATENTS = (2, 5, 8)
"""Latent frames in the recording: the last latent frame of each chunk."""


def village() -> Path:
    """Return the path set in TINY_WORLD_PATH, or else the path of the shipped checkpoint."""
    named = os.environ.get("TINY_WORLD_PATH")
    if named:
        return Path(named)
    from vllm_omni.worlds import village_checkpoint

    return Path(village_checkpoint())


def made_frames(checkpoint: Path, start_HW3: torch.Tensor) -> list[torch.Tensor]:
    """Return the walk's frames from two sessions of one engine. Shape of each: [33, 96, 160, 3],
    uint8.
    """
    world = EngineWorld(
        checkpoint, (HEIGHT, WIDTH), omni={}, batch=2, dtype="float32", enforce_eager=True
    )
    try:
        return world.play([WALK, WALK], torch.stack((start_HW3, start_HW3)))
    finally:
        world.close()


def kept(video_THW3: torch.Tensor) -> torch.Tensor:
    """Return the video's frames at `KEPT_LATENTS`, stacked vertically as one image, as the
    recording stores them.
    """
    return torch.cat([video_THW3[4 * latent] for latent in KEPT_LATENTS])


def start_image() -> torch.Tensor:
    from training.tiny_world.render import Renderer
    from training.tiny_world.truth import start_images

    return start_images(Renderer("cpu", HEIGHT, WIDTH, compiled=False, frames_per_call=1), [WALK])[
        0
    ]


if __name__ == "__main__":
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(kept(made_frames(village(), start_image())[0]).numpy()).save(
        GOLDEN, optimize=True
    )
    print(f"wrote {GOLDEN}: {GOLDEN.stat().st_size} bytes")
