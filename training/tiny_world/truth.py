# SPDX-License-Identifier: Apache-2.0
"""Renders the expected frames of walks and computes the mean colours of the styles.

All frames are uint8 [N, L, H, W, 3] on the CPU, one per latent frame. Tested by
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
from vllm_omni.evaluation.likeness import unit

HELD_OUT = 770_001
"""Offset added to the seed of held-out walks, so training never uses the same seeds."""
_REFERENCE_PLACES = 96
_COARSE = 24, 40
"""Height and width of renders for mean colours. The field of view is the same as that of the full
image.
"""


def rendered(
    renderer: Renderer, walks: Sequence[Played], latents: slice | None = None
) -> torch.Tensor:
    """Render the ground truth at latent frames, uint8 [N, L, H, W, 3] on the CPU."""
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
    """Render the start image of each walk, uint8 [N, H, W, 3] on the CPU."""
    return rendered(renderer, walks, slice(0, 1))[:, 0]


@dataclass(frozen=True)
class RenderedWorld:
    """A world that shows the ground truth, which every measure should rate as perfect."""

    renderer: Renderer

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        """Render latent frames, and repeat each one to fill its video frames.

        A walk's prompts select the style.
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
    """Computes the ground truth's mean colours in every style from low-resolution renders."""

    renderer: Renderer

    @classmethod
    def beside(cls, renderer: Renderer) -> "Palette":
        return cls(Renderer(renderer.device, *_COARSE, compiled=renderer.compiled))

    def of_styles(self) -> torch.Tensor:
        """Return each style's mean colour over fixed positions and headings, [S, 3] in [0, 1]."""
        starts, yaw = free_places(_REFERENCE_PLACES, torch.Generator().manual_seed(HELD_OUT))
        means = []
        for style in range(len(STYLES)):
            images = self.renderer.render(
                starts, yaw, torch.zeros_like(yaw), torch.full((len(yaw),), style)
            )
            means.append(unit(images).mean(dim=(0, 2, 3)).cpu())
        return torch.stack(means)

    def of_walks(self, walks: Sequence[Played]) -> torch.Tensor:
        """Return each latent frame's mean colour in every style, [N, L, S, 3]."""
        shown = [
            unit(rendered(self.renderer, [replace(walk, style=style) for walk in walks])).mean(
                dim=(3, 4)
            )
            for style in range(len(STYLES))
        ]
        return torch.stack(shown, dim=2)


class Truth:
    """The expected frames of walks, rendered once for all worlds that are compared with them."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.palette = Palette.beside(renderer)
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def frames(self, walks: Sequence[Played]) -> torch.Tensor:
        """Return each walk's frames in its style."""
        return self._once("frames", walks, lambda: rendered(self.renderer, walks))

    def starts(self, walks: Sequence[Played]) -> torch.Tensor:
        """Return the start image of each walk, [N, H, W, 3]."""
        return self._once("starts", walks, lambda: start_images(self.renderer, walks))

    def colours(self, walks: Sequence[Played]) -> torch.Tensor:
        """Return the result of `Palette.of_walks` for these walks."""
        return self._once("colours", walks, lambda: self.palette.of_walks(walks))

    def style_means(self) -> torch.Tensor:
        """Return the result of `Palette.of_styles`."""
        return self._once("styles", (), self.palette.of_styles)

    def _once(
        self, what: str, walks: Sequence[Played], make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        key = (what, *((walk.start, walk.yaw, walk.keys, walk.style) for walk in walks))
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]
