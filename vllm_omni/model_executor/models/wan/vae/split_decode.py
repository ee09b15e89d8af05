# SPDX-License-Identifier: Apache-2.0
"""Splits a VAE decode over several ranks. Each rank decodes one band of rows in every frame.

The decoder consists of 3x3 and 3x3x3 convolutions, nearest-neighbour upsampling, per-position norms
and, in the middle, one attention layer over each frame. A band therefore needs a halo exchange of
one row before each spatial convolution, and an all-gather of keys and values for the attention. All
other operations are local. At the upper and lower edges of the frame, a row of zeros replaces the
halo, like the unsplit decoder's padding. The layers compute the same sums as the unsplit decoder,
but kernels may add the terms in a different order.

`split_decoder` replaces the convolutions and the attention of an existing decoder with layers that
have the same parameter names. A stream's feature cache then contains only the rows of the band.
Every rank receives all latents, and the decoded frames are gathered on the first rank. Each decode
is a collective operation in `RowBands.group`. To avoid a deadlock, all ranks must decode the same
chunks of the same streams in the same order. `ChunkEnd` and `VAEStage` ensure this.
"""

# B batch, C channels, T frames, H rows, W columns, R rows of this band

from functools import partial

import torch
import torch.distributed as dist
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanCausalConv3d
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, split_evenly
from vllm_omni.model_executor.layers.cuda_graphs import (
    between_graphs,
    persistent_buffer,
    persistent_copy,
)
from vllm_omni.model_executor.models.wan.vae.latents import VAE_SPATIAL
from vllm_omni.model_executor.models.wan.vae_layers import replace_layers
from vllm_omni.outputs import RequestFailed, empty_result

_all_gather = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
"""torch's all-gather for a single tensor. Its name in torch 2.13 differs from the name in earlier
releases. Dynamo supports both names.
"""


class RowBands:
    """This rank's band of rows, and the collectives between bands. Band heights differ by at most
    one latent row, and taller bands come first.

    Args:
        rank: Index of this rank in the group.
        size: Number of ranks.
        group: Process group used only for decodes. Decodes may run on another CUDA stream,
            concurrently with denoise steps. If decodes and denoise steps shared a group, their
            collectives would wait for each other.
        row_pixels: Height of a latent row in pixels.
    """

    def __init__(
        self, rank: int, size: int, group: dist.ProcessGroup, row_pixels: int = VAE_SPATIAL
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.row_pixels = row_pixels
        self.latent_height = 0
        """Latent height of the stream being decoded."""

    @classmethod
    def of_parallel(cls, parallel: ParallelContext, row_pixels: int) -> "RowBands | None":
        """Return this rank's band, or None if the rank decodes whole frames."""
        if parallel.decode_group is None:
            return None
        return cls(parallel.rank, parallel.size, parallel.decode_group, row_pixels)

    def rows(self, latent_height: int) -> range:
        """Return the range of latent rows in this rank's band.

        Raises:
            RequestFailed: The frame has fewer latent rows than there are ranks.
        """
        if latent_height < self.size:
            raise RequestFailed(
                "unsupported_size",
                f"{self.size} ranks share the VAE's decode by rows of {self.row_pixels} pixels: "
                f"height must be at least {self.row_pixels * self.size}, "
                f"got {self.row_pixels * latent_height}",
            )
        lengths = split_evenly(latent_height, self.size)
        start = sum(lengths[: self.rank])
        return range(start, start + lengths[self.rank])

    def take_band(self, latents_1CTHW: torch.Tensor) -> torch.Tensor:
        """Return this rank's band of rows from the latents of whole frames.

        The other methods use the height of these latents until the next decode.
        """
        self.latent_height = latents_1CTHW.shape[3]
        rows = self.rows(self.latent_height)
        return latents_1CTHW[:, :, :, rows.start : rows.stop]

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """All-gather tensors [n, ...] into one tensor [n * size, ...], in rank order.

        The tensors must have the same shape on all ranks. The result is valid until the next call.
        """
        own = persistent_copy("rows", own)
        every = persistent_buffer("rows of all ranks", (self.size * len(own), *own.shape[1:]), own)
        between_graphs(partial(_all_gather, every, own, group=self.group))
        return every

    def with_neighbours(self, x: torch.Tensor) -> torch.Tensor:
        """Add a halo of one row above and below: [B, C, ..., R, W] -> [B, C, ..., R + 2, W].

        The rows come from the adjacent bands. At the edges of the frame, they are zeros.
        """
        # On CUDA, the halo is channels-last like `x`, because concatenating rows in a different
        # layout would transpose `x`.
        above, below = self._adjoining(
            torch.stack([x.select(-2, row).movedim(1, -1) for row in (0, -1)])
        )
        return torch.cat(
            (above.movedim(-1, 1).unsqueeze(-2), x, below.movedim(-1, 1).unsqueeze(-2)), dim=-2
        )

    def fill_edges(self, x_NRWC: torch.Tensor) -> None:
        """Fill the first and last rows of `x_NRWC` in place with the halo that `with_neighbours`
        adds. The rows of the band lie between these two rows.
        """
        x_NRWC[:, 0], x_NRWC[:, -1] = self._adjoining(torch.stack((x_NRWC[:, 1], x_NRWC[:, -2])))

    def _adjoining(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the first and last rows of this band, [2, ...], to the neighbouring bands, and
        return the rows above and below the band. Rows outside the frame are zeros.
        """
        rows = self.gathered(own)
        nothing = own.new_zeros(own.shape[1:])
        above = rows[2 * self.rank - 1] if self.rank > 0 else nothing
        below = rows[2 * self.rank + 2] if self.rank < self.size - 1 else nothing
        return above, below

    def all_rows(self, x_R: torch.Tensor) -> torch.Tensor:
        """All-gather the latent rows of every rank, [R, ...] -> [H, ...]."""
        lengths = split_evenly(self.latent_height, self.size)
        padded = functional.pad(
            x_R, (0, 0) * (x_R.dim() - 1) + (0, lengths[0] - x_R.shape[0])
        ).contiguous()
        rows = self.gathered(padded)
        if lengths[-1] == lengths[0]:
            return rows
        return torch.cat(
            [part[:length] for part, length in zip(rows.chunk(self.size), lengths, strict=True)]
        )

    def join_frames(self, frames_TRWC: torch.Tensor) -> torch.Tensor | None:
        """Gather the uint8 frames of all bands into whole frames [T, H, W, C] on the first rank.
        Return None on other ranks.
        """
        frames, rows, width, channels = frames_TRWC.shape
        factor = rows // len(self.rows(self.latent_height))
        lengths = [factor * length for length in split_evenly(self.latent_height, self.size)]
        padded = functional.pad(frames_TRWC, (0, 0, 0, 0, 0, lengths[0] - rows)).contiguous()
        parts = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 else None
        dist.gather(padded, parts, group=self.group, group_dst=0)
        if parts is None:
            return None
        shape = (frames, sum(lengths), width, channels)
        whole = padded.new_empty(shape) if padded.is_cuda else empty_result(shape, torch.uint8)
        return torch.cat(
            [part[:, :length] for part, length in zip(parts, lengths, strict=True)],
            dim=1,
            out=whole,
        )


class BandCausalConv3d(WanCausalConv3d):
    """A causal convolution over this rank's band of each frame."""

    def __init__(self, whole: WanCausalConv3d, bands: RowBands) -> None:
        super().__init__(whole.in_channels, whole.out_channels, 3, padding=1)
        assert (
            whole.kernel_size == (3, 3, 3)
            and whole._padding == self._padding
            and whole.stride == (1, 1, 1)
        )
        self.bands = bands
        self.padding = (0, 0, 1)

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        past = 0
        if cache_x is not None:
            past = cache_x.shape[2]
            x = torch.cat((cache_x, x), dim=2)
        x = self.bands.with_neighbours(x)
        missing = 2 - past  # frames before a stream starts are zeros
        if missing > 0:
            x = functional.pad(x, (0, 0, 0, 0, missing, 0))
        return nn.Conv3d.forward(self, x)


class BandConv2d(nn.Conv2d):
    """A 3x3 convolution over this rank's band of a frame."""

    def __init__(self, whole: nn.Conv2d, bands: RowBands) -> None:
        super().__init__(whole.in_channels, whole.out_channels, 3, padding=(0, 1))
        assert whole.kernel_size == (3, 3) and whole.padding == (1, 1) and whole.stride == (1, 1)
        self.bands = bands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.bands.with_neighbours(x))


class BandAttention(WanAttentionBlock):
    """Attention over whole frames. The queries of this rank's band attend to the keys of all
    ranks.
    """

    def __init__(self, whole: WanAttentionBlock, bands: RowBands) -> None:
        super().__init__(whole.dim)
        self.bands = bands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, time, rows, width = x.shape
        frames = self.norm(x.transpose(1, 2).reshape(batch * time, channels, rows, width))
        # The tensor is made contiguous, because torch has no fused attention kernel for other
        # layouts and would fall back to fp32 matrix products.
        qkv = self.to_qkv(frames).movedim(1, -1).contiguous()  # [frames, R, W, 3 C]
        query = qkv[..., :channels].flatten(1, 2)
        rows_first = self.bands.all_rows(qkv[..., channels:].transpose(0, 1))
        key, value = rows_first.transpose(0, 1).flatten(1, 2).chunk(2, dim=-1)
        seen = functional.scaled_dot_product_attention(
            query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        )
        seen = seen.squeeze(1).transpose(1, 2).reshape(batch * time, channels, rows, width)
        return x + self.proj(seen).view(batch, time, channels, rows, width).transpose(1, 2)


def split_decoder(decoder: nn.Module, bands: RowBands) -> None:
    """Replace, in place, every `WanDecoder3d` layer whose results depend on rows in other bands.

    The new layers have new parameters under the same names, so the caller must load the weights
    afterwards.
    """
    replace_layers(decoder, lambda layer: _in_bands(layer, bands))


def _in_bands(layer: nn.Module, bands: RowBands) -> nn.Module | None:
    if isinstance(layer, WanAttentionBlock):
        return BandAttention(layer, bands)
    if isinstance(layer, WanCausalConv3d):
        return BandCausalConv3d(layer, bands) if layer.kernel_size[1] > 1 else None
    if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
        return BandConv2d(layer, bands)
    return None
