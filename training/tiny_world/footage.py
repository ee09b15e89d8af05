# SPDX-License-Identifier: Apache-2.0
"""Renders clips of random walks for training the autoencoder and the decoders. The clips are
rendered on the training device.
"""

import time

import torch

from training.tiny_world.render import Renderer
from training.tiny_world.village import STYLES
from training.tiny_world.walks import Walks, random_walks


def render_video(renderer: Renderer, walks: Walks, style_N: torch.Tensor) -> torch.Tensor:
    """Render each walk in its style and return uint8 [N, T, H, W, 3] on the renderer's device."""
    positions, yaw, pitch = walks.frames()
    number, frames = yaw.shape
    styles = style_N[:, None].expand(number, frames).flatten()
    images = renderer.render(positions.flatten(0, 1), yaw.flatten(), pitch.flatten(), styles)
    return images.view(number, frames, *images.shape[1:])


def pixels(clips_BTHW3: torch.Tensor) -> torch.Tensor:
    """Convert uint8 frames [B, T, H, W, 3] to fp32 [B, T, 3, H, W] in [-1, 1]."""
    return clips_BTHW3.permute(0, 1, 4, 2, 3).float() / 127.5 - 1


class Footage:
    """A pool of rendered clips of `latents` latent frames. All clips are drawn from a single seed.
    The pool can be sampled indefinitely.

    Clips are rendered for `seconds` seconds, in batches of `at_once`. At least one batch is
    rendered, and rendering stops early once there are `largest` clips.
    """

    def __init__(
        self,
        renderer: Renderer,
        latents: int,
        seed: int,
        *,
        seconds: float,
        largest: int = 6000,
        at_once: int = 256,
    ) -> None:
        started = time.monotonic()
        parts: list[torch.Tensor] = []
        while not parts or (
            time.monotonic() - started < seconds and at_once * len(parts) < largest
        ):
            walks = random_walks(at_once, latents, seed + 7919 * len(parts))
            style = torch.arange(at_once) % len(STYLES)
            parts.append(render_video(renderer, walks, style))
            if renderer.device.type == "cuda":
                torch.cuda.synchronize(renderer.device)
        self.clips = torch.cat(parts)

    def __len__(self) -> int:
        return len(self.clips)

    def sample(self, number: int, frames: int) -> torch.Tensor:
        """Return pixels [number, frames, 3, H, W] of random clips, cut at random latent frames."""
        device = self.clips.device
        which = torch.randint(len(self.clips), (number, 1), device=device)
        start = 4 * torch.randint(
            (self.clips.shape[1] - frames) // 4 + 1, (number, 1), device=device
        )
        return pixels(self.clips[which, start + torch.arange(frames, device=device)])
