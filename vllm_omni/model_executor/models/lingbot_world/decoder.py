# SPDX-License-Identifier: Apache-2.0
"""From one chunk's clean latents to its video frames, and what the next chunk's decode goes on from.

`cache`: the causal decoder's own features, so that a stream equals the whole clip bit for bit. `restart` (PR 3701's
extension): the last two latent frames, decoded once more in front of the next chunk by a decoder that has just begun;
their 5 video frames are dropped. That is an approximation, decodes 5 latent frames for 3, and keeps 0.8 MiB of a
session of 480x832 instead of 1.8 GiB.
Held by tests/model_executor/models/lingbot_world/test_lingbot_alternatives.py.
"""

from typing import Literal

import torch

from vllm_omni.model_executor.models.wan.chunk_plan import first_pixel_frame
from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE, VAECache

WARM_UP_LATENTS = 2
"""Latent frames decoded again: a causal convolution looks two frames back."""


class ChunkDecoder:
    """Decodes one chunk after another. Owns no session; `vae` needs its decoder.

    What a stream remembers is a `VAECache` in both ways: the convolutions' inputs, or one tensor [1, 16, 1 or 2, h, w],
    fp32, of latents.
    """

    def __init__(self, vae: StreamingWanVAE, continuation: Literal["cache", "restart"] = "cache") -> None:
        self.vae = vae
        self.restarts = continuation == "restart"

    def decode(self, latents_1CFhw: torch.Tensor, before: VAECache | None) -> tuple[torch.Tensor, VAECache]:
        """Return pixels [1, 3, T, H, W] of the stream's next latents, T = 4 F (4 F - 3 at its start), and what to keep.

        As `StreamingWanVAE.decode`, which the first chunk's frames are of in both ways.
        """
        if not self.restarts:
            return self.vae.decode(latents_1CFhw, before)
        again = 0
        if before is not None:
            (kept,) = before.features
            again = kept.shape[2]
            latents_1CFhw = torch.cat((kept, latents_1CFhw), dim=2)
        pixels, _ = self.vae.decode(latents_1CFhw, None)
        newest = latents_1CFhw[:, :, -WARM_UP_LATENTS:].clone()
        return pixels[:, :, first_pixel_frame(again) :], VAECache((newest,))

    def state_nbytes(self, height: int, width: int) -> int:
        """Most bytes of what a stream of `height` x `width` pixels keeps; runs nothing."""
        if not self.restarts:
            return self.vae.decoder_cache_nbytes(height, width)
        config = self.vae.config
        cells = (height // config.spatial_factor) * (width // config.spatial_factor)
        return 4 * config.z_dim * WARM_UP_LATENTS * cells
