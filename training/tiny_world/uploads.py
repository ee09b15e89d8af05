# SPDX-License-Identifier: Apache-2.0
"""Measures how a world continues images that do not come from its own renderer and have no known
pose.

    python -m training.tiny_world.score --model DIR --seed 1 --uploads

One session starts from each of eight images (`UPLOADS`): three sample images from the web page and
five from scikit-image. Because there is no ground truth, a world's result is compared with that of
another world:

    turn        a look key held: the median turn of a latent frame divided by the commanded turn,
                and the number of turns in the wrong direction
    step        `w` held: the median growth of the image per latent frame; 1 means no movement. At
                a depth of d metres, a step of s metres causes a growth of d / (d - s)
    style       share of walks whose last chunk is closest to the prompt's style in mean colour
    level       mean level of the last chunk minus the style's mean, with pixel values in [-1, 1]
"""

import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from training.tiny_world import measure
from training.tiny_world.play import LATENTS_A_CHUNK, Played, World
from training.tiny_world.prompts import PROMPTS
from training.tiny_world.village import STYLES
from vllm_omni.evaluation.camera_motion import growths
from vllm_omni.evaluation.likeness import unit

SAMPLES = ("desert.jpg", "forest.jpg", "harbour.jpg")
PICTURES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
UPLOADS = (*SAMPLES, *PICTURES)
"""File names of the start images."""
TURN_LATENTS, STEP_LATENTS = 20, 8


def load_uploads(height: int, width: int) -> torch.Tensor:
    """Return the start images cropped to the given size, uint8 [8, H, W, 3]."""
    samples = importlib.resources.files("vllm_omni.entrypoints.webui") / "static/samples"
    pictures = importlib.resources.files("skimage") / "data"
    files = [samples / name for name in SAMPLES] + [pictures / name for name in PICTURES]
    images = []
    for file in files:
        with Image.open(Path(str(file))) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
        images.append(torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8))
    return torch.stack(images).view(-1, height, width, 3)


def uploaded(keys: Sequence[str], latents: int, seed: int) -> list[Played]:
    """Return one walk from each image: one latent frame at rest, then frames that hold one of
    `keys`. The keys alternate between images.
    """
    walks = []
    for index in range(len(UPLOADS)):
        style = index % len(STYLES)
        prompt = {0: PROMPTS[STYLES[style]][0]}
        held = ("", *[keys[index % len(keys)]] * latents)
        walks.append(Played(None, 0.0, held, style, prompt, seed * 1000 + index))
    return walks


def score_uploads(
    world: World, size: tuple[int, int], style_means_S3: torch.Tensor, *, seed: int
) -> dict[str, Any]:
    """Measure a world with frames of `size`. `style_means_S3` is the mean colour of each style."""
    from training.tiny_world.score import turn_score

    images = load_uploads(*size)
    turned = uploaded(("l", "j"), TURN_LATENTS, seed)
    stepped = uploaded(("w",), STEP_LATENTS, seed)
    turns, steps = world.play(turned, images), world.play(stepped, images)
    style = torch.tensor([walk.style for walk in turned])
    ends = torch.stack([unit(video[::4][-LATENTS_A_CHUNK:]) for video in turns])
    named = measure.named_style(measure.mean_colour(ends), style_means_S3.expand(len(ends), -1, -1))
    levels = 2 * (ends.flatten(1).mean(dim=1) - style_means_S3[style].mean(dim=1))
    growth = torch.stack([growths(video[::4]) for video in steps])
    return {
        "seed": seed,
        "images": list(UPLOADS),
        "turn": turn_score(turns, turned),
        "step": {
            "growth": round(float(growth.median()), 4),
            "by_image": [round(float(row.median()), 4) for row in growth],
        },
        "style": round(float((named == style).float().mean()), 4),
        "level": {
            "by_image": [round(float(value), 4) for value in levels],
            "largest": round(float(levels.abs().max()), 4),
        },
    }
