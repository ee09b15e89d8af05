# SPDX-License-Identifier: Apache-2.0
"""Draw the web page's sample start images. They are deterministic JPEG files of 20 to 60 kB each.

python scripts/draw_start_samples.py vllm_omni/entrypoints/webui/static/samples
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

WIDTH, HEIGHT, SCALE = 832, 480, 2  # drawn SCALE times larger and then reduced, for smooth edges

Colour = tuple[int, int, int]


class Scene:
    """An image that is being drawn. Coordinates are those of the finished 832x480 image."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE))

    def gradient(self, top: float, bottom: float, stops: list[tuple[float, Colour]]) -> None:
        """Fill the rows between `top` and `bottom` with a gradient. Each stop is (position in 0..1,
        colour).
        """
        rows = np.arange(round(top * SCALE), round(bottom * SCALE))
        at = np.linspace(0, 1, len(rows))
        xs, colours = [stop for stop, _ in stops], np.array([colour for _, colour in stops], float)
        strip = np.stack([np.interp(at, xs, colours[:, channel]) for channel in range(3)], 1)
        block = np.repeat(strip[:, None], WIDTH * SCALE, 1).round().astype(np.uint8)
        self.image.paste(Image.fromarray(block), (0, int(rows[0])))

    def polygon(self, points: list[tuple[float, float]], colour: Colour) -> None:
        ImageDraw.Draw(self.image).polygon([(x * SCALE, y * SCALE) for x, y in points], fill=colour)

    def disc(self, x: float, y: float, radius: float, colour: Colour) -> None:
        box = [
            (x - radius) * SCALE,
            (y - radius) * SCALE,
            (x + radius) * SCALE,
            (y + radius) * SCALE,
        ]
        ImageDraw.Draw(self.image).ellipse(box, fill=colour)

    def line(self, points: list[tuple[float, float]], width: float, colour: Colour) -> None:
        draw = ImageDraw.Draw(self.image)
        draw.line(
            [(x * SCALE, y * SCALE) for x, y in points],
            fill=colour,
            width=max(1, round(width * SCALE)),
        )

    def ridge(self, base: float, height: float, roughness: int, colour: Colour) -> None:
        """Draw a hilly silhouette from edge to edge, and fill the image below it."""
        xs = np.linspace(0, WIDTH, 200)
        ys = np.full_like(xs, base)
        for octave in range(roughness):
            phase, share = self.random.uniform(0, 6.28), 0.5**octave
            ys -= (
                height
                * share
                * (0.5 + 0.5 * np.sin(xs / WIDTH * 6.28 * (0.8 + 1.7 * octave) + phase))
            )
        points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
        self.polygon([(0, HEIGHT), *points, (WIDTH, HEIGHT)], colour)

    def glow(self, x: float, y: float, radius: float, colour: Colour, strength: float) -> None:
        """Add a light around (x, y) that falls off smoothly."""
        ys, xs = np.mgrid[0 : HEIGHT * SCALE, 0 : WIDTH * SCALE] / SCALE
        light = strength * np.exp(-((xs - x) ** 2 + (ys - y) ** 2) / (2 * radius**2))
        pixels = np.asarray(self.image, float)
        pixels += (np.array(colour, float) - pixels) * light[..., None]
        self.image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))

    def finish(self) -> Image.Image:
        """Downscale the image and add slight grain, so that gradients show no bands."""
        small = self.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
        grain = self.random.normal(0, 1.6, (HEIGHT, WIDTH, 1))
        return Image.fromarray((np.asarray(small, float) + grain).clip(0, 255).astype(np.uint8))


def harbour() -> Image.Image:
    scene = Scene(3)
    scene.gradient(0, 270, [(0, (58, 84, 132)), (0.55, (196, 146, 148)), (1, (255, 208, 150))])
    scene.glow(560, 248, 120, (255, 232, 178), 0.9)
    scene.disc(560, 240, 26, (255, 244, 214))
    scene.ridge(268, 60, 3, (150, 122, 142))
    scene.ridge(272, 34, 4, (112, 98, 128))
    scene.gradient(268, HEIGHT, [(0, (246, 196, 152)), (0.25, (150, 132, 152)), (1, (36, 56, 88))])
    for row in range(46):  # the sun on the water
        y = 272 + row * 4.4
        half = 16 + row * 1.3 + scene.random.uniform(-8, 16)
        x = 560 + scene.random.uniform(-12, 12)
        scene.line([(x - half, y), (x + half, y)], 1.1, (255, 214 - row, 168 - row))
    for x, y, size in ((170, 330, 1.0), (330, 300, 0.55), (690, 352, 1.25), (455, 290, 0.4)):
        hull: Colour = (40, 44, 66) if x != 690 else (92, 44, 48)
        scene.polygon(
            [
                (x - 62 * size, y),
                (x + 66 * size, y - 8 * size),
                (x + 44 * size, y + 22 * size),
                (x - 46 * size, y + 22 * size),
            ],
            hull,
        )
        scene.polygon(
            [
                (x - 20 * size, y),
                (x + 14 * size, y - 4 * size),
                (x + 14 * size, y - 26 * size),
                (x - 20 * size, y - 26 * size),
            ],
            (222, 210, 200),
        )
        scene.line([(x - 26 * size, y), (x - 26 * size, y - 96 * size)], 2.4 * size, (48, 42, 56))
        scene.line(
            [(x - 26 * size, y - 92 * size), (x + 58 * size, y - 8 * size)], 0.9, (70, 62, 76)
        )
        scene.polygon(
            [
                (x - 40 * size, y + 24 * size),
                (x + 40 * size, y + 24 * size),
                (x + 20 * size, y + 50 * size),
                (x - 24 * size, y + 50 * size),
            ],
            (58, 66, 96),
        )
    scene.polygon([(0, 408), (250, 392), (350, HEIGHT), (0, HEIGHT)], (74, 62, 66))  # the quay
    for step in range(7):
        scene.line([(0, 412 + step * 11), (252 + step * 15, 396 + step * 13)], 1.6, (54, 46, 52))
    for x, y in ((60, 398), (150, 393), (235, 390)):
        scene.polygon(
            [(x - 6, y + 26), (x + 6, y + 26), (x + 5, y - 14), (x - 5, y - 14)], (46, 40, 48)
        )
        scene.disc(x, y - 14, 8, (58, 50, 58))
    scene.glow(300, 284, 230, (255, 220, 190), 0.22)
    return scene.finish()


def desert() -> Image.Image:
    scene = Scene(8)
    scene.gradient(0, 360, [(0, (8, 12, 38)), (0.6, (28, 40, 92)), (1, (92, 92, 148))])
    for _ in range(420):
        x, y = scene.random.uniform(0, WIDTH), 290 * scene.random.beta(1, 1.6)
        light = int(scene.random.uniform(110, 255))
        scene.disc(
            x,
            y,
            float(scene.random.choice([0.5, 0.7, 0.9, 1.4], p=[0.5, 0.3, 0.15, 0.05])),
            (light, light, 255),
        )
    scene.glow(628, 104, 70, (196, 208, 255), 0.6)
    scene.disc(628, 104, 34, (242, 242, 236))
    for x, y, radius in ((617, 96, 8), (638, 114, 6), (634, 92, 4)):
        scene.disc(x, y, radius, (222, 224, 226))
    for base, height, colour in (
        (330, 54, (74, 78, 128)),
        (362, 60, (98, 94, 132)),
        (404, 74, (128, 112, 130)),
        (470, 90, (162, 136, 134)),
    ):
        scene.ridge(base, height, 2, colour)
    crest = [(0, 388), (150, 360), (330, 402), (470, 452), (560, HEIGHT)]
    scene.polygon([*crest, (0, HEIGHT)], (92, 84, 116))
    for offset in range(9):
        scene.line([(x, y + 14 + offset * 12) for x, y in crest], 1.0, (104, 94, 122))
    for x, y, size in ((704, 372, 1.0), (744, 380, 0.7)):  # cacti against the sky
        dark: Colour = (36, 42, 62)
        scene.line([(x, y), (x, y - 74 * size)], 9 * size, dark)
        scene.line(
            [(x, y - 30 * size), (x - 20 * size, y - 32 * size), (x - 20 * size, y - 56 * size)],
            6 * size,
            dark,
        )
        scene.line(
            [(x, y - 40 * size), (x + 19 * size, y - 42 * size), (x + 19 * size, y - 66 * size)],
            6 * size,
            dark,
        )
    return scene.finish()


def forest() -> Image.Image:
    scene = Scene(5)
    scene.gradient(
        0,
        HEIGHT,
        [(0, (250, 214, 128)), (0.45, (244, 190, 108)), (0.62, (176, 122, 62)), (1, (92, 58, 34))],
    )
    scene.glow(430, 170, 150, (255, 246, 206), 0.85)
    for depth, (count, ground, colour) in enumerate(
        (
            (26, 268, (206, 158, 96)),
            (18, 290, (158, 110, 66)),
            (11, 330, (104, 70, 46)),
            (6, 410, (58, 40, 32)),
        )
    ):
        if depth:
            scene.image = scene.image.filter(ImageFilter.GaussianBlur(2.2 - 0.7 * depth))
        wide = 5 + 7 * depth + 5 * depth**2 / 2
        for _ in range(count):
            side = scene.random.choice([-1, 1])
            gap = 34 + 46 * depth
            x = 424 + side * (gap + scene.random.uniform(0, 430))
            lean = scene.random.uniform(-9, 9)
            base = ground + scene.random.uniform(-6, 16)
            scene.polygon(
                [
                    (x - wide / 2, base),
                    (x + wide / 2, base),
                    (x + lean + wide / 3, -10),
                    (x + lean - wide / 3, -10),
                ],
                colour,
            )
        leaf = np.array([(232, 150, 48), (214, 106, 34), (240, 188, 74), (180, 76, 34)])[:, :]
        for _ in range(420 - 70 * depth):  # crowns
            x, y = scene.random.uniform(0, WIDTH), scene.random.uniform(-10, 120 - 12 * depth)
            if abs(x - 424) < 60 + 30 * depth and y > 40:
                continue
            shade = leaf[scene.random.integers(4)] * (1.08 - 0.17 * depth)
            scene.disc(
                x,
                y,
                scene.random.uniform(4, 10 + 4 * depth),
                tuple(int(v) for v in shade.clip(0, 255)),
            )
    scene.polygon(
        [(412, 276), (440, 276), (500, 340), (610, HEIGHT), (210, HEIGHT), (356, 340)],
        (206, 160, 104),
    )
    scene.polygon(
        [(420, 276), (432, 276), (452, 340), (500, HEIGHT), (330, HEIGHT), (396, 340)],
        (226, 184, 124),
    )
    for _ in range(900):  # fallen leaves
        y = 280 + 200 * scene.random.beta(2, 1.3)
        x, size = scene.random.uniform(0, WIDTH), 0.8 + (y - 280) / 60
        colour = [(222, 132, 42), (196, 88, 32), (236, 176, 70), (150, 70, 34)][
            int(scene.random.integers(4))
        ]
        scene.polygon(
            [(x - size, y), (x, y - size * 0.6), (x + size, y), (x, y + size * 0.6)], colour
        )
    for angle in (-0.95, -0.5, -0.12, 0.28, 0.7):  # sun rays
        ray = Image.new("L", scene.image.size)
        far = [
            (430 + 700 * np.sin(angle + d), 150 + 700 * np.cos(angle + d)) for d in (-0.05, 0.05)
        ]
        ImageDraw.Draw(ray).polygon(
            [(430 * SCALE, 120 * SCALE), *((x * SCALE, y * SCALE) for x, y in far)], fill=46
        )
        ray = ray.filter(ImageFilter.GaussianBlur(18))
        scene.image.paste(Image.new("RGB", scene.image.size, (255, 240, 196)), mask=ray)
    return scene.finish()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scenes: list[Callable[[], Image.Image]] = [harbour, desert, forest]
    for scene in scenes:
        path = folder / f"{scene.__name__}.jpg"
        scene().save(path, quality=88, optimize=True)
        print(f"wrote {path} ({path.stat().st_size} bytes)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
