# SPDX-License-Identifier: Apache-2.0
"""A Wan decoder shared by several ranks ("parallel VAE decode"): each makes a band of rows of every frame.

The decoder is made of 3x3(x3) convolutions, nearest upsampling, norms per position and one attention over each frame
in the middle. So a band needs of its neighbours one row before each spatial convolution, and everybody's keys and
values at the attention; all else is its own. At the picture's upper and lower edge a row of zeros stands for the
neighbour, as in the whole decoder's padding: the sums are the same, only kernels may order them differently.

`split_decoder` replaces those layers of a built decoder by ones of the same parameter names; the feature cache of a
stream then holds the band's rows only. Latents go in whole on every rank; frames are joined where they are needed.
Everything here is collective over `RowBands.group`: its ranks decode the same chunks of the same streams in the same
order, or wait for each other for ever: `ChunkEnd` and `VAEStage` see to that.
Knows no session and no request. Held by tests/model_executor/models/wan/test_split_decode.py.
"""

# B batch, C channels, T frames, H rows, W columns, R rows of this band

from functools import partial

import torch
import torch.distributed as dist
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanCausalConv3d
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.forward_graphs import between_graphs, kept_buffer, kept_copy
from vllm_omni.model_executor.layers.parallel import ParallelContext, split_evenly
from vllm_omni.model_executor.models.wan.vae_layers import replace_layers
from vllm_omni.outputs import RequestFailed, empty_result

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""One operation: the name that torch 2.13 asks for, and the one that earlier releases have. Dynamo knows both."""


class RowBands:
    """This rank's band, and the rows bands exchange. Bands differ by one latent row at most, the longer ones first.

    group: of `size` ranks, used for decodes only: they may run on a stream of their own beside the denoise steps, whose
    collectives on the same group would have to wait for them.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.latent_height = 0
        """Of the stream that is being decoded."""

    @classmethod
    def of(cls, parallel: ParallelContext) -> "RowBands | None":
        """None where one rank decodes alone."""
        if parallel.decode_group is None:
            return None
        return cls(parallel.rank, parallel.size, parallel.decode_group)

    def rows(self, latent_height: int) -> range:
        """This rank's latent rows. Raises `RequestFailed` if there are fewer rows than ranks."""
        if latent_height < self.size:
            raise RequestFailed(
                "unsupported_size",
                f"{self.size} ranks share the VAE's decode by rows of 8 pixels: height must be at least "
                f"{8 * self.size}, got {8 * latent_height}",
            )
        lengths = split_evenly(latent_height, self.size)
        start = sum(lengths[: self.rank])
        return range(start, start + lengths[self.rank])

    def take(self, latents_1CTHW: torch.Tensor) -> torch.Tensor:
        """Return this rank's band of whole latents; later calls belong to a stream of their height."""
        self.latent_height = latents_1CTHW.shape[3]
        rows = self.rows(self.latent_height)
        return latents_1CTHW[:, :, :, rows.start : rows.stop]

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [n * size, ...]: every rank's tensor, of one shape, in the order of ranks.

        Use it before the next call.
        """
        own = kept_copy("rows", own)
        every = kept_buffer("rows of all ranks", (self.size * len(own), *own.shape[1:]), own)
        between_graphs(partial(_all_gather, every, own, group=self.group))
        return every

    def with_neighbours(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, ..., R, W] -> [B, C, ..., R + 2, W]: the neighbours' adjoining rows around this band's, or zeros."""
        # Channels last: on CUDA `x` lies so, and joining it with rows of another layout would turn it round.
        above, below = self._adjoining(torch.stack([x.select(-2, row).movedim(1, -1) for row in (0, -1)]))
        return torch.cat((above.movedim(-1, 1).unsqueeze(-2), x, below.movedim(-1, 1).unsqueeze(-2)), dim=-2)

    def fill_edges(self, x_NRWC: torch.Tensor) -> None:
        """Fill the first and last row in place, as `with_neighbours`; the band's own are those between."""
        x_NRWC[:, 0], x_NRWC[:, -1] = self._adjoining(torch.stack((x_NRWC[:, 1], x_NRWC[:, -2])))

    def _adjoining(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[2, ...], this band's first and last row -> the row above it and the row below; zeros outside the picture."""
        rows = self.gathered(own)
        nothing = own.new_zeros(own.shape[1:])
        above = rows[2 * self.rank - 1] if self.rank > 0 else nothing
        below = rows[2 * self.rank + 2] if self.rank < self.size - 1 else nothing
        return above, below

    def all_rows(self, x_R: torch.Tensor) -> torch.Tensor:
        """[R, ...] -> [H, ...]: every rank's latent rows."""
        lengths = split_evenly(self.latent_height, self.size)
        padded = functional.pad(x_R, (0, 0) * (x_R.dim() - 1) + (0, lengths[0] - x_R.shape[0])).contiguous()
        rows = self.gathered(padded)
        if lengths[-1] == lengths[0]:
            return rows
        return torch.cat([part[:length] for part, length in zip(rows.chunk(self.size), lengths, strict=True)])

    def join_frames(self, frames_TRWC: torch.Tensor) -> torch.Tensor | None:
        """uint8 frames of this band -> whole frames [T, H, W, C] on the first rank, None on the others."""
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
        return torch.cat([part[:, :length] for part, length in zip(parts, lengths, strict=True)], dim=1, out=whole)


class BandCausalConv3d(WanCausalConv3d):
    """A causal convolution over frames of which this rank has a band."""

    def __init__(self, whole: WanCausalConv3d, bands: RowBands) -> None:
        super().__init__(whole.in_channels, whole.out_channels, 3, padding=1)
        assert whole.kernel_size == (3, 3, 3) and whole._padding == self._padding and whole.stride == (1, 1, 1)
        self.bands = bands
        self.padding = (0, 0, 1)

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        past = 0
        if cache_x is not None:
            past = cache_x.shape[2]
            x = torch.cat((cache_x, x), dim=2)
        x = self.bands.with_neighbours(x)
        missing = 2 - past  # frames before a stream's first are zeros
        if missing > 0:
            x = functional.pad(x, (0, 0, 0, 0, missing, 0))
        return nn.Conv3d.forward(self, x)


class BandConv2d(nn.Conv2d):
    """A 3x3 convolution over a frame of which this rank has a band."""

    def __init__(self, whole: nn.Conv2d, bands: RowBands) -> None:
        super().__init__(whole.in_channels, whole.out_channels, 3, padding=(0, 1))
        assert whole.kernel_size == (3, 3) and whole.padding == (1, 1) and whole.stride == (1, 1)
        self.bands = bands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.bands.with_neighbours(x))


class BandAttention(WanAttentionBlock):
    """Attention over each whole frame, of which this rank has a band: its rows look at everybody's."""

    def __init__(self, whole: WanAttentionBlock, bands: RowBands) -> None:
        super().__init__(whole.dim)
        self.bands = bands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, time, rows, width = x.shape
        frames = self.norm(x.transpose(1, 2).reshape(batch * time, channels, rows, width))
        # Contiguous: otherwise torch has no fused kernel for it and multiplies in fp32.
        qkv = self.to_qkv(frames).movedim(1, -1).contiguous()  # [frames, R, W, 3 C]
        query = qkv[..., :channels].flatten(1, 2)
        rows_first = self.bands.all_rows(qkv[..., channels:].transpose(0, 1))
        key, value = rows_first.transpose(0, 1).flatten(1, 2).chunk(2, dim=-1)
        seen = functional.scaled_dot_product_attention(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
        seen = seen.squeeze(1).transpose(1, 2).reshape(batch * time, channels, rows, width)
        return x + self.proj(seen).view(batch, time, channels, rows, width).transpose(1, 2)


def split_decoder(decoder: nn.Module, bands: RowBands) -> None:
    """Let a `WanDecoder3d` decode bands: replace, in place, every layer that looks beyond its own row.

    Parameters keep their names; their values are those of new layers, so load weights afterwards.
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
