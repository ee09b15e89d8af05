# SPDX-License-Identifier: Apache-2.0
"""A tiny streaming decoder for Wan latents. It is about 25 times (Wan 2.1) or 200 times (Wan 2.2)
cheaper than Wan's own decoder, but its frames are only approximate.

The weights have the TAEHV layout (`taew2_1.pth` or `taew2_2.pth`), and the layers come from
`taehv.py`. The encoder in the file is not used. Every latent frame is decoded to 4 video frames.
For the first latent frame of a stream, only the last of these 4 frames is used.
"""

# C channels, T frames, h, w latent cells

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.checkpoint.loading import load_strict, shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import (
    AdaptedSource,
    Shape,
    open_tensors,
    unchanged,
)
from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import WanComponents, check_tiny_vae
from vllm_omni.model_executor.models.wan.vae import taehv
from vllm_omni.model_executor.models.wan.vae.vae import CacheLayout, VAECache, lay_channels_last

CHANNELS = (256, 128, 64, 64)
"""Widths of the released decoder: one per level, followed by the width of the last layer."""
_WAN_2_1 = VAEConfig()


class TinyVAEDecoder(nn.Module):
    """The tiny decoder with an explicit cache. Its parameters have TAEHV's names.

    Args:
        channels: Widths of the layers: one per level, followed by the width of the last layer.
        config: Config of the autoencoder that produced the latents. It determines the number of
            latent channels and the side length of the pixel cells.
        dtype: Dtype of weights, activations and cache.
    """

    def __init__(
        self,
        channels: Sequence[int] = CHANNELS,
        config: VAEConfig = _WAN_2_1,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.channels, self.config = tuple(channels), config
        self.decoder = taehv.decoder(config.z_dim, channels, config.frame_channels).to(dtype)
        self.dtype = dtype
        self.requires_grad_(False)
        lay_channels_last(self)
        self.eval()

    @torch.no_grad()
    def decode(
        self, latents_1CTHW: torch.Tensor, cache: VAECache | None
    ) -> tuple[torch.Tensor, VAECache]:
        """Decode the next latents of a stream.

        Args:
            latents_1CTHW: Normalised latents [1, C, n, h, w], in any float dtype.
            cache: Result of the previous call, or None if the stream starts with these latents.

        Returns:
            Pixels [1, 3, T, H, W] in [-1, 1], and the next cache. T is 4n (4n - 3 at the start of a
            stream), and H and W are h and w times `VAEConfig.spatial_factor`.
        """
        x = latents_1CTHW[0].transpose(0, 1).to(self.dtype)
        x, retained = taehv.run_stream(self.decoder, x, cache)
        if cache is None:
            x = x[3:]  # the first latent frame of a stream becomes a single video frame
        # The channels contain each cell's pixels row by row, unlike the output channels of Wan's
        # decoder.
        x = functional.pixel_shuffle(x, self.config.patch)
        pixels_1CTHW = (x * 2 - 1).clamp_(-1.0, 1.0).transpose(0, 1).unsqueeze(0)
        return pixels_1CTHW, retained

    def decoder_cache_layout(self, height: int, width: int) -> CacheLayout:
        """Return the cache layout for a stream of `height` x `width` pixels."""
        factor = self.config.spatial_factor
        memory = taehv.decoder_memory(self.channels, height // factor, width // factor)
        return CacheLayout(memory, self.dtype)

    def decoder_cache_nbytes(self, height: int, width: int) -> int:
        return self.decoder_cache_layout(height, width).nbytes


def tiny_vae_channels(path: Path | None) -> tuple[int, ...]:
    """Return the decoder widths stored in a TAEHV file, or the released widths if `path` is None.

    Raises:
        ValueError: The file is not a TAEHV file.
    """
    return CHANNELS if path is None else taehv.decoder_widths(path)


def load_tiny_vae(decoder: TinyVAEDecoder, path: Path) -> None:
    """Load the decoder strictly from a TAEHV file.

    Raises:
        ValueError: Tensors are missing, unexpected or misshapen.
    """
    source = open_tensors(path)
    encoder = [name for name in source.shapes if name.startswith("encoder.")]
    shapes = shapes_of(decoder)
    adapted = AdaptedSource(source, partial(_released_form, shapes=shapes))
    load_strict(decoder, adapted, shapes, what="tiny VAE", ignored=encoder)


def _released_form(
    name: str, shapes: Mapping[str, Shape]
) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the function that converts a stored tensor, keyed by the name of the resulting tensor.

    In a file, a layer that increases the number of frames may have more output channels than
    needed. In this case, only the last channels are used.
    """
    if not name.endswith(".conv.weight") or name not in shapes:
        return {name: unchanged}
    return {name: lambda stored: stored[-shapes[name][0] :]}


def load_wanted(
    decoder: TinyVAEDecoder | None, layout: WanComponents, wanted_by: str | None
) -> None:
    """Load this rank's tiny decoder, if it has one, from the checkpoint's directory.

    Args:
        decoder: The tiny decoder, or None on a rank that does not decode.
        layout: Components of the checkpoint.
        wanted_by: Option that requires the tiny decoder, as a user would write it, or None if no
            option requires it. If an option requires the decoder and the file is missing, every
            rank raises an error.

    Raises:
        ValueError: The file is missing, or its tensors do not match the decoder.
    """
    if wanted_by is not None:
        check_tiny_vae(layout, wanted_by)
    if decoder is not None and layout.tiny_vae is not None:
        load_tiny_vae(decoder, layout.tiny_vae)
