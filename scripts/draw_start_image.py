# SPDX-License-Identifier: Apache-2.0
"""Draw the demo's start image: a path through hills towards the sun.

The output is deterministic and takes up a few kB as PNG.

python scripts/draw_start_image.py vllm_omni/entrypoints/cli/data/start.png
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw

WIDTH, HEIGHT, SCALE = 416, 240, 4  # drawn SCALE times larger and then reduced, for smooth edges
HORIZON = 120


def main(path: Path) -> None:
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE))
    draw = ImageDraw.Draw(image)

    def polygon(points: list[tuple[float, float]], colour: tuple[int, int, int]) -> None:
        draw.polygon([(x * SCALE, y * SCALE) for x, y in points], fill=colour)

    def disc(x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
        draw.ellipse(
            [
                (x - radius) * SCALE,
                (y - radius) * SCALE,
                (x + radius) * SCALE,
                (y + radius) * SCALE,
            ],
            colour,
        )

    for band in range(12):  # sky, darker upwards
        top = band * HORIZON / 12
        draw.rectangle(
            [0, top * SCALE, WIDTH * SCALE, (top + HORIZON / 12) * SCALE],
            (96 + 11 * band, 150 + 6 * band, 214 - 2 * band),
        )
    for radius, colour in ((34, (250, 214, 150)), (22, (255, 236, 190))):
        disc(292, 96, radius, colour)
    polygon(
        [
            (0, 120),
            (60, 74),
            (110, 104),
            (170, 58),
            (240, 112),
            (320, 84),
            (416, 118),
            (416, 130),
            (0, 130),
        ],
        (118, 132, 168),
    )
    polygon(
        [(0, 126), (80, 100), (180, 124), (290, 102), (416, 126), (416, 150), (0, 150)],
        (86, 128, 98),
    )
    for band in range(10):  # meadow, brighter towards the viewer
        top = HORIZON + band * (HEIGHT - HORIZON) / 10
        draw.rectangle(
            [0, (top + 6) * SCALE, WIDTH * SCALE, HEIGHT * SCALE],
            (70 + 5 * band, 122 + 5 * band, 62 + 2 * band),
        )
    polygon(
        [
            (204, 128),
            (212, 128),
            (252, 168),
            (226, 196),
            (330, 240),
            (110, 240),
            (176, 196),
            (222, 166),
        ],
        (206, 178, 132),
    )
    for x, base, size in (
        (40, 190, 46),
        (92, 150, 22),
        (148, 138, 13),
        (300, 140, 14),
        (346, 160, 30),
        (396, 210, 58),
    ):
        polygon([(x - size * 0.05, base), (x + size * 0.05, base), (x, base - size)], (92, 66, 44))
        for tier in range(3):
            top, half = base - size * (1.25 - 0.28 * tier), size * (0.2 + 0.08 * tier)
            polygon(
                [(x, top), (x - half, top + size * 0.42), (x + half, top + size * 0.42)],
                (34 + 8 * tier, 84 + 8 * tier, 58),
            )
    image = image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    image.quantize(48, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"wrote {path} ({path.stat().st_size} bytes)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
