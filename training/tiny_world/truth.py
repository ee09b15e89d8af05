# SPDX-License-Identifier: Apache-2.0
"""What walks should look like: rendered frames, and the mean colours that name a style.

Frames are uint8 [N, L, H, W, 3] on the CPU, one a latent frame. Held by
tests/training/tiny_world/test_score.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from training.tiny_world.play import Played
from training.tiny_world.prompts import PROMPTS
from training.tiny_world.render import Renderer
from training.tiny_world.village import STYLES
from training.tiny_world.walks import free_places

HELD_OUT = 770_001
"""Added to the seed: no training data is drawn from such seeds."""
_REFERENCE_PLACES = 96
_COARSE = 24, 40
"""Pixels that are enough for mean colours, as wide as the whole picture."""


def unit(frames_HW3: torch.Tensor) -> torch.Tensor:
    """uint8 [..., H, W, 3] -> fp32 [..., 3, H, W] in [0, 1]."""
    return frames_HW3.movedim(-1, -3).float() / 255


def rendered(
    renderer: Renderer, walks: Sequence[Played], latents: slice | None = None
) -> torch.Tensor:
    """The truth at latent frames, uint8 [N, L, H, W, 3] on the CPU."""
    chosen = slice(None) if latents is None else latents
    truths = [walk.walk() for walk in walks]
    positions, yaw, pitch = (
        torch.cat([getattr(truth, name)[:, chosen] for truth in truths])
        for name in ("positions", "yaw", "pitch")
    )
    style = torch.tensor([walk.style for walk in walks])[:, None].expand(yaw.shape).flatten()
    images = renderer.render(positions.flatten(0, 1), yaw.flatten(), pitch.flatten(), style)
    return images.view(*yaw.shape, *images.shape[1:]).cpu()


def start_images(renderer: Renderer, walks: Sequence[Played]) -> torch.Tensor:
    """What each walk starts from, uint8 [N, H, W, 3] on the CPU."""
    return rendered(renderer, walks, slice(0, 1))[:, 0]


@dataclass(frozen=True)
class RenderedWorld:
    """A world whose model is the truth: what the measures say of a perfect one."""

    renderer: Renderer

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        """Latent frames are rendered; the video frames before each repeat it.

        Prompts choose the style shown.
        """
        videos = []
        for walk in walks:
            parts = []
            for start, end in zip(
                walk.prompts, [*list(walk.prompts)[1:], len(walk.keys)], strict=True
            ):
                style = next(
                    index
                    for index, name in enumerate(STYLES)
                    if walk.prompts[start] in PROMPTS[name]
                )
                shown = Played(walk.start, walk.yaw, walk.keys, style, walk.prompts, walk.seed)
                parts.append(rendered(self.renderer, [shown], slice(start, end))[0])
            latents = torch.cat(parts)
            videos.append(torch.cat((latents[:1], latents[1:].repeat_interleave(4, dim=0))))
        return videos


@dataclass(frozen=True)
class Palette:
    """Mean colours of the truth in every style, from coarse pictures."""

    renderer: Renderer

    @classmethod
    def beside(cls, renderer: Renderer) -> "Palette":
        return cls(Renderer(renderer.device, *_COARSE, compiled=renderer.compiled))

    def of_styles(self) -> torch.Tensor:
        """Each style's over fixed places and headings, in [0, 1], [S, 3]."""
        starts, yaw = free_places(_REFERENCE_PLACES, torch.Generator().manual_seed(HELD_OUT))
        means = []
        for style in range(len(STYLES)):
            images = self.renderer.render(
                starts, yaw, torch.zeros_like(yaw), torch.full((len(yaw),), style)
            )
            means.append(unit(images).mean(dim=(0, 2, 3)).cpu())
        return torch.stack(means)

    def of_walks(self, walks: Sequence[Played]) -> torch.Tensor:
        """Each latent frame's as it would be in every style, [N, L, S, 3]."""
        shown = [
            unit(rendered(self.renderer, [replace(walk, style=style) for walk in walks])).mean(
                dim=(3, 4)
            )
            for style in range(len(STYLES))
        ]
        return torch.stack(shown, dim=2)


class Truth:
    """What walks should look like; each is rendered once, however many worlds are measured
    against it.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.palette = Palette.beside(renderer)
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def frames(self, walks: Sequence[Played]) -> torch.Tensor:
        """Each walk's, in its own style."""
        return self._once("frames", walks, lambda: rendered(self.renderer, walks))

    def starts(self, walks: Sequence[Played]) -> torch.Tensor:
        """What each walk starts from, [N, H, W, 3]."""
        return self._once("starts", walks, lambda: start_images(self.renderer, walks))

    def colours(self, walks: Sequence[Played]) -> torch.Tensor:
        """As `Palette.of_walks`."""
        return self._once("colours", walks, lambda: self.palette.of_walks(walks))

    def style_means(self) -> torch.Tensor:
        """As `Palette.of_styles`."""
        return self._once("styles", (), self.palette.of_styles)

    def _once(
        self, what: str, walks: Sequence[Played], make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        key = (what, *((walk.start, walk.yaw, walk.keys, walk.style) for walk in walks))
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
