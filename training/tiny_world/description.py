# SPDX-License-Identifier: Apache-2.0
"""Complete an exported checkpoint with the files that describe its world.

The script writes `world.json`, the map, the expected video of the tour, and the manifest.

    # a checkpoint written by training.tiny_world.export
    python -m training.tiny_world.description DIR
    # keep the tour's video (rendering it takes a minute)
    python -m training.tiny_world.description DIR --no-truth

Run this script last, because the manifest records the checksums of all files at that time. Tested
by tests/training/tiny_world/test_tiny_world_description.py.
"""

# T video frames, L latent frames

import argparse
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import torch
from PIL import Image, ImageDraw

from training.tiny_world.export import VIEWS
from training.tiny_world.prompts import PROMPTS
from training.tiny_world.render import FOCAL, Renderer
from training.tiny_world.village import (
    CHURCH,
    HOUSES,
    PERIOD,
    PINES,
    PITCH_LIMIT_DEGREES,
    ROOFS,
    STYLES,
    TOWER,
    TREES,
    WELL,
    Colour,
)
from training.tiny_world.walks import STEP_M, Walks, key_bits, scripted_walks, village_grid
from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.model_executor.models.lingbot_world.camera import MOVE_UNIT
from vllm_omni.worlds.description import (
    CARD,
    StartImage,
    WorldDescription,
    WorldGrid,
    WorldMap,
    WorldPrompt,
    WorldTour,
    read_description,
)
from vllm_omni.worlds.manifest import ChecksumManifest, write_manifest

DOMAIN = "tiny_village"
WRITE_AGAIN = "vllm-omni make-world DIR"
FPS = 16
MAP, GRID, TRUTH = "map.png", "grid.png", "tour.mp4"
ABOUT = (
    "A small village on a green square, and nothing else: a picture from elsewhere is taken, but "
    "within a few steps it "
    "turns into something like the village."
)
_MAP_PIXELS = 384
DENOISE_INDICES = (0,)
"""Denoise steps used to serve the world. If the pose is known, additional steps do not improve the
scores.
"""
# Keys and the number of latent frames for which they are held: along the street into the square, a
# turn away and back, and then onward with another prompt.
_TOUR = (("", 1), ("w", 6), ("l", 6), ("j", 6), ("wj", 4), ("w", 7), ("wl", 4), ("l", 2))
_TOUR_START = ("street", "day")
_TOUR_PROMPTS = [(0, "day"), (21, "snow")]


def describe_world(*, decoder: str = "tiny", truth: bool = True) -> WorldDescription:
    """Return the contents of `world.json`."""
    keys = [held for held, count in _TOUR for _ in range(count)]
    start = _image(*_TOUR_START)
    return WorldDescription(
        domain=DOMAIN,
        title="The village",
        about=ABOUT,
        sizes=((160, 96),),
        metres_per_unit=STEP_M / MOVE_UNIT,
        prompts=tuple(WorldPrompt(style, PROMPTS[style][0]) for style in STYLES),
        starts=tuple(
            StartImage(
                name=name,
                prompt=style,
                file=_image(name, style),
                x_m=x,
                z_m=z,
                heading_degrees=heading,
            )
            for style in STYLES
            for name, x, z, heading in VIEWS
        ),
        focal=FOCAL,
        map=WorldMap(file=MAP, side_m=PERIOD),
        grid=WorldGrid(file=GRID, side_m=PERIOD),
        pitch_limit_degrees=PITCH_LIMIT_DEGREES,
        tour=WorldTour(
            start=start, seed=7, keys=keys, prompts=_TOUR_PROMPTS, truth=TRUTH if truth else None
        ),
        model={"decoder": decoder, "denoise_indices": list(DENOISE_INDICES)},
    )


def tour_walk(description: WorldDescription) -> Walks:
    """Return the tour's walk."""
    assert description.tour is not None
    start = next(start for start in description.starts if start.file == description.tour.start)
    keys = torch.tensor([[key_bits(held) for held in description.tour.keys]], dtype=torch.uint8)
    heading = torch.deg2rad(torch.tensor([start.heading_degrees]))
    return scripted_walks(torch.tensor([[start.x_m, start.z_m]]), heading, keys)


def tour_styles(description: WorldDescription) -> torch.Tensor:
    """Return the style of each video frame in the tour, [T]. A prompt applies from the first video
    frame of its latent frame.
    """
    assert description.tour is not None
    style_T = torch.zeros(4 * len(description.tour.keys) - 3, dtype=torch.long)
    for latent, name in description.tour.prompts:
        style_T[max(0, 4 * latent - 3) :] = STYLES.index(name)
    return style_T


def render_tour(
    description: WorldDescription, renderer: Renderer, frames: slice = slice(None)
) -> np.ndarray:
    """Render the tour's expected frames, uint8 [T, H, W, 3]."""
    positions, yaw, pitch = (value[0] for value in tour_walk(description).frames())
    views = (value[frames] for value in (positions, yaw, pitch, tour_styles(description)))
    return renderer.render(*views).cpu().numpy()


def draw_map(pixels: int = _MAP_PIXELS) -> Image.Image:
    """Draw the village from above by day, with north at the top and (0, 0) in the middle."""
    ground = Renderer().ground(0)
    middle = len(ground) // 2
    rolled = ground.roll((middle, middle), dims=(0, 1)).flip(0)
    image = Image.fromarray((rolled.clamp(0, 1) * 255).round().byte().numpy()).resize(
        (2 * pixels, 2 * pixels)
    )
    draw = ImageDraw.Draw(image)
    scale = 2 * pixels / PERIOD

    def at(x: float, z: float) -> tuple[float, float]:
        return pixels + x * scale, pixels - z * scale

    def block(
        x: float, z: float, width: float, depth: float, heading: float, colour: Colour
    ) -> None:
        cos, sin = math.cos(math.radians(heading)), math.sin(math.radians(heading))
        # The roof has two slopes, and its ridge runs along the house's depth.
        for side, shade in ((-1, 0.85), (1, 1.05)):
            corners = [(0, -depth), (side * width, -depth), (side * width, depth), (0, depth)]
            polygon = [at(x + cos * u + sin * v, z - sin * u + cos * v) for u, v in corners]
            draw.polygon(polygon, fill=_rgb(colour, shade))

    def disc(x: float, z: float, radius: float, colour: Colour) -> None:
        (u, v), r = at(x, z), radius * scale
        draw.ellipse((u - r, v - r, u + r, v + r), fill=_rgb(colour))

    for (x, z, width, depth, _, heading), roof in zip(HOUSES, ROOFS, strict=False):
        block(x, z, width + 0.25, depth + 0.2, heading, roof)
    x, z, width, depth, _, heading = CHURCH
    block(x, z, width + 0.2, depth + 0.2, heading, (0.20, 0.38, 0.62))
    turn = math.radians(heading)
    block(
        x + (depth + 1) * math.sin(turn),
        z + (depth + 1) * math.cos(turn),
        1.25,
        1.25,
        heading,
        (0.16, 0.30, 0.52),
    )
    block(TOWER[0], TOWER[1], TOWER[2] * 1.35, TOWER[2] * 1.35, 45.0, (0.80, 0.16, 0.14))
    block(WELL[0], WELL[1], WELL[2] + 0.3, WELL[2] + 0.2, 90.0, (0.62, 0.20, 0.55))
    for x, z, _, radius in TREES:
        disc(x, z, radius, (0.20, 0.42, 0.14))
    for x, z, _ in PINES:
        disc(x, z, 1.0, (0.10, 0.34, 0.20))
    return image.resize((pixels, pixels), Image.Resampling.LANCZOS)


def complete(
    folder: Path, *, decoder: str = "tiny", truth: bool = True, compiled: bool = True
) -> ChecksumManifest:
    """Write the world description, the map, the tour and the manifest into a checkpoint directory.
    If `truth` is set, the tour video is rendered again.
    """
    description = describe_world(decoder=decoder)
    (folder / CARD).write_text(json.dumps(msgspec.to_builtins(description), indent=1) + "\n")
    village_grid().write(folder / GRID)
    draw_map().quantize(128, dither=Image.Dither.NONE).save(folder / MAP, optimize=True)
    if truth:
        frames_THWC = render_tour(description, Renderer(compiled=compiled, frames_per_call=4))
        (folder / TRUTH).write_bytes(encode_mp4(frames_THWC, FPS))
    if read_description(folder) != description:
        raise ValueError(f"{folder / CARD} does not read back as it was written")
    return write_manifest(folder, WRITE_AGAIN)


def _image(name: str, style: str) -> str:
    return f"start/{name}_{style}.png"


def _rgb(colour: Colour, shade: float = 1.0) -> tuple[int, ...]:
    return tuple(round(255 * min(1.0, value * shade)) for value in colour)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--decoder",
        choices=("tiny", "wan"),
        default="tiny",
        help="decoder that is served by default",
    )
    parser.add_argument(
        "--no-truth", dest="truth", action="store_false", help="keep the tour's video as it is"
    )
    args = parser.parse_args()
    manifest = complete(args.folder, decoder=args.decoder, truth=args.truth)
    size = sum(entry.bytes for entry in manifest.files.values())
    print(f"{args.folder}: {len(manifest.files)} files, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
