# SPDX-License-Identifier: Apache-2.0
"""The ABot-World-0 causal transformer: the Wan 2.2 TI2V-5B backbone with inputs for keyboard keys
and reference images.

Reference images become tokens that precede the tokens of a session's first chunk. The keyboard keys
of a latent frame form a small vector, whose embedding is added to the frame's patch tokens. Maths:
amap-cvlab/ABot-World @ e260168.
"""

# B batch entries, F latent frames of a chunk, h x w patches of a frame, D width, K keys, S
# reference images, T tokens of a chunk on this rank

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.attention.attention import stack
from vllm_omni.model_executor.layers.attention.rope import rope_tables
from vllm_omni.model_executor.models.abot_world.config import SPACE, AbotWorldConfig
from vllm_omni.model_executor.models.wan.transformer.chunk_transformer import (
    ChunkItem,
    ChunkTransformer,
)
from vllm_omni.model_executor.models.wan.transformer.layers import patchify


@dataclass(frozen=True, kw_only=True)
class AbotItem(ChunkItem):
    """A batch entry with keyboard keys and, in a session's first chunk, reference images."""

    keys: torch.Tensor | None
    """Result of `AbotWorldTransformer.embed_keys`. None on stages after the first."""
    references: torch.Tensor | None = None
    """Result of `AbotWorldTransformer.reference_patches`. None in later chunks and on later stages.
    """
    given: torch.Tensor | None = None
    """Mask of the given reference images, fp32 [S]: 1.0 for a given image and 0.0 for a missing
    one."""


class KeyVector(nn.Module):
    """The first convolution of the action adapter, as an fp32 matrix. A key has the same value in
    all pixels, so the convolution's weights can be summed over all equal inputs (`fold_keys`).
    """

    def __init__(self, config: AbotWorldConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.dim, len(SPACE.buttons), dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(config.dim, dtype=torch.float32))

    def forward(self, keys_FK: torch.Tensor) -> torch.Tensor:
        return functional.linear(keys_FK, self.weight, self.bias)


class KeyResidual(nn.Module):
    """A residual block of two 3x3 convolutions with zero padding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x_FDhw: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.conv1(x_FDhw))
        result: torch.Tensor = x_FDhw + self.conv2(hidden)
        return result


class KeyAdapter(nn.Module):
    """The action adapter, which maps the keyboard keys of each latent frame to values that are
    added to the frame's patch tokens.

    The 3x3 convolutions receive the same vector for every patch, so their results differ only near
    the border. The adapter computes the results for at most 5 x 5 patches, and repeats the middle
    patch.
    """

    def __init__(self, config: AbotWorldConfig) -> None:
        super().__init__()
        self.conv = KeyVector(config)
        self.residual_blocks = nn.ModuleList([KeyResidual(config.dim)])

    def forward(self, keys_FK: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Return the values to add to `height` x `width` patches, [F, D, h, w] in the model's
        dtype.
        """
        residual = self.residual_blocks[0]
        assert isinstance(residual, KeyResidual)
        vector_FD = self.conv(keys_FK).to(residual.conv1.weight.dtype)
        rows, columns = (_border(size, keys_FK.device) for size in (height, width))
        small = vector_FD[:, :, None, None].expand(-1, -1, min(5, height), min(5, width))
        result: torch.Tensor = residual(small.contiguous())[:, :, rows][..., columns]
        return result


def _border(size: int, device: torch.device) -> torch.Tensor:
    """Return the index of each patch's result along an axis of `size` patches. There are at most 5
    results: those of the first two patches, a middle patch, and the last two patches.
    """
    positions = torch.arange(size, device=device)
    from_end = (positions - size + 5).clamp(min=2)
    return positions if size <= 5 else torch.where(positions < 2, positions, from_end)


class AbotWorldTransformer(ChunkTransformer[AbotWorldConfig]):
    """This rank's part of the network. The parameters of a new instance are uninitialised and use
    torch's default dtype and device.
    """

    moving_fields = (*ChunkTransformer.moving_fields, "keys", "references", "given")

    def _add_layers(self) -> None:
        if self.parallel.first_stage:
            self.act_control_adapter = KeyAdapter(self.config)

    def channels(self, item: AbotItem) -> torch.Tensor:
        return item.latents

    def embed(self, items: Sequence[AbotItem], own: slice) -> torch.Tensor:
        return stack([self._embed(item, own) for item in items])

    def _embed(self, item: AbotItem, own: slice) -> torch.Tensor:
        """Return this rank's embedded tokens of one chunk, [T, D]. The reference tokens precede the
        frame tokens.
        """
        assert item.keys is not None, "the first stage needs the keys"
        lead = item.lead_tokens
        frames = slice(max(0, own.start - lead), max(0, own.stop - lead))
        patches = patchify(item.latents)[frames]
        x_TD = self.patch_embedding(patches) + item.keys[frames]
        if own.start >= lead:
            return x_TD
        assert item.references is not None and item.given is not None
        patches_NP = item.references
        masks_N1 = item.given.repeat_interleave(len(patches_NP) // len(item.given))[:, None]
        own_lead = slice(own.start, min(own.stop, lead))
        lead_TD = self.patch_embedding(patches_NP[own_lead]) * masks_N1[own_lead].to(x_TD.dtype)
        return torch.cat((lead_TD, x_TD))

    def embed_keys(self, keys_FK: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """Return the values that a chunk's keyboard keys add to all its patch tokens, [F h w, D].

        Args:
            keys_FK: Keyboard keys, fp32: 1.0 for each held key, otherwise 0.0.
            size: Latent size of the chunk, [channels, F, h, w].
        """
        keys = to_device(keys_FK, self.device)
        values = self.act_control_adapter(keys, size[2] // 2, size[3] // 2)
        return values.permute(0, 2, 3, 1).flatten(0, 2).contiguous()

    def reference_patches(self, latents_SChw: torch.Tensor) -> torch.Tensor:
        """Return the patches of all reference images, [tokens, values per patch]."""
        return torch.cat([patchify(x[:, None].contiguous()) for x in latents_SChw])

    def chunk_rope(
        self, frames: range, size: Sequence[int], lead: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rotary tables for a chunk. If `lead` is set, the tables for its
        references come first.
        """
        if not lead:
            return self.rope(frames, size)
        config = self.config
        side = config.latent_size(config.reference_size, config.reference_size)[0] // 2
        starts = [config.reference_position(slot) for slot in range(config.reference_slots)]
        tables = [rope_tables(config.head_dim, range(at, at + 1), side, side) for at in starts]
        tables.append(rope_tables(config.head_dim, frames, size[2] // 2, size[3] // 2))
        cos, sin = (torch.cat(parts) for parts in zip(*tables, strict=True))
        own = self.parallel.token_slice(len(cos))
        return to_device(cos[own], self.device), to_device(sin[own], self.device)

    def window_sizes(self, tokens_per_frame: int) -> dict[str, Any]:
        """Return the arguments for this rank's `PinnedWindow`s, except the frame counts and the
        storage.
        """
        sizes = super().window_sizes(tokens_per_frame)
        return {**sizes, "pinned_tokens": self.config.reference_tokens}
