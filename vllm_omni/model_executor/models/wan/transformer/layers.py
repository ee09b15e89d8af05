# SPDX-License-Identifier: Apache-2.0
"""Layers that the Wan diffusion transformers share: embeddings, attention over K/V windows, and the
output head.

The layers do not depend on sessions or schedules, because each batch entry provides its own K/V
window and cross-attention K/V. Each model family composes its blocks from these layers
(`lingbot_world/transformer.py`, `causal_wan/transformer.py`).

Linear layers run in the model's dtype. Modulation, normalisation, rotation, the time MLPs and the
head run in fp32.
"""

# B batch entries (one chunk of one session each), L tokens of a chunk, T of them on this rank, D
# width, N heads (of this rank where sharded), H head dim, C = H/2 rotary channels, S text tokens, P
# values of one patch

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

from vllm_omni.model_executor.layers.attention.attention import cross_attention, stack
from vllm_omni.model_executor.layers.collectives.parallel import ChannelWeight, ParallelContext
from vllm_omni.model_executor.layers.kv_cache.quantized_storage import KVSlot
from vllm_omni.model_executor.layers.kv_cache.window import WindowAttention, WindowItem
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    LinearPrecision,
    MergedLinear,
    RowLinear,
)
from vllm_omni.model_executor.layers.linear.quantized_input import Input, quantized
from vllm_omni.model_executor.models.wan.architecture import WanConfig
from vllm_omni.model_executor.models.wan.transformer.fused_ops import FusedOps
from vllm_omni.model_executor.models.wan.transformer.timesteps import TimestepEmbeddings


class AttentionItem(WindowItem, Protocol):
    """One batch entry: a chunk with its self-attention window and its prompt's cross-attention K/V,
    [layers, 2, S, N, H].
    """

    @property
    def cross_kv(self) -> torch.Tensor: ...


class PatchEmbedding(nn.Module):
    """The (1, 2, 2) patch convolution, computed as a matrix product over the tokens that `patchify`
    returns.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        shape = (config.dim, config.in_channels, *config.patch_size)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(config.dim), requires_grad=False)

    def forward(self, tokens_TP: torch.Tensor) -> torch.Tensor:
        return functional.linear(tokens_TP.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class SelfAttention(nn.Module):
    def __init__(
        self,
        config: WanConfig,
        parallel: ParallelContext,
        fused_ops: FusedOps,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__()
        self.dim, self.eps = config.dim, config.eps
        self.parallel = parallel
        self.fused_ops = fused_ops
        dim = config.dim
        self.qkv = MergedLinear(
            dim, ("q", "k", "v"), (dim, dim, dim), parallel, quant_config, f"{prefix}.qkv"
        )
        self.norm_q = ChannelWeight(config.dim, parallel)
        self.norm_k = ChannelWeight(config.dim, parallel)
        self.o = RowLinear(dim, dim, parallel, quant_config, f"{prefix}.o")

    def forward(
        self,
        x_BTD: Input,
        items: Sequence[AttentionItem],
        rope: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        exchange: WindowAttention,
        write_only: bool,
    ) -> torch.Tensor | None:
        """Write the K/V for `layer` to the windows, and return the attention result. If
        `write_only` is true, return None after the write.
        """
        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        squares_q, squares_k = squares_of_all_ranks(self.fused_ops, self.parallel, q, k)
        q = self.fused_ops.rms_rope(q, squares_q, self.norm_q.weight, *rope, self.dim, self.eps)
        buffers = exchange.buffers(items, layer)
        if buffers is None:
            k = self.fused_ops.rms_rope(k, squares_k, self.norm_k.weight, *rope, self.dim, self.eps)
            attended = exchange.attend(
                items, layer, q, k, v.unflatten(-1, k.shape[-2:]), write_only
            )
        else:
            self._store(buffers, k, squares_k, v, rope)
            attended = None if write_only else exchange.attend_to_written(items, layer, q)
        return None if attended is None else self.o(attended.flatten(-2))

    def _store(
        self,
        buffers: Sequence[KVSlot],
        k_BTD: torch.Tensor,
        squares_BT1: torch.Tensor | None,
        v_BTD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Normalise and rotate the keys, and write keys and values to the windows."""
        for number, position in enumerate(buffers):
            self.fused_ops.store_keys_values(
                k_BTD[number],
                None if squares_BT1 is None else squares_BT1[number],
                self.norm_k.weight,
                rope[0][number],
                rope[1][number],
                self.dim,
                self.eps,
                v_BTD[number],
                position.stored_2TNH,
                position.scales_2N,
            )


class CrossAttention(nn.Module):
    def __init__(
        self,
        config: WanConfig,
        parallel: ParallelContext,
        fused_ops: FusedOps,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__()
        self.dim, self.eps = config.dim, config.eps
        self.head_dim = config.head_dim
        self.parallel = parallel
        self.fused_ops = fused_ops
        dim = config.dim
        self.q = ColumnLinear(dim, dim, parallel, quant_config, f"{prefix}.q")
        self.kv = MergedLinear(dim, ("k", "v"), (dim, dim), parallel, quant_config, f"{prefix}.kv")
        self.norm_q = ChannelWeight(config.dim, parallel)
        self.norm_k = ChannelWeight(config.dim, parallel)
        self.o = RowLinear(dim, dim, parallel, quant_config, f"{prefix}.o")

    def keys_values(self, text_SD: torch.Tensor) -> torch.Tensor:
        """Return a prompt's cross-attention K and V, [2, S, N, H]."""
        k, v = self.kv(text_SD).chunk(2, dim=-1)
        return torch.stack((self._normed(k, self.norm_k), v)).unflatten(-1, (-1, self.head_dim))

    def _normed(self, x_TD: torch.Tensor, norm: ChannelWeight) -> torch.Tensor:
        (squares,) = squares_of_all_ranks(self.fused_ops, self.parallel, x_TD)
        return self.fused_ops.rms_scale(x_TD, squares, norm.weight, self.dim, self.eps)

    def forward(self, x_BTD: Input, items: Sequence[AttentionItem], index: int) -> torch.Tensor:
        q = self._normed(self.q(x_BTD), self.norm_q).unflatten(-1, (-1, self.head_dim))
        attended = [
            cross_attention(q_TNH, *item.cross_kv[index])
            for item, q_TNH in zip(items, q, strict=True)
        ]
        return self.o(stack(attended).flatten(-2))


class ImageProjection(nn.Module):
    """Projects an image encoder's hidden states to the width of an image-to-video network."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width, dim = config.text_dim, config.dim
        self.proj = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, dim),
            nn.LayerNorm(dim),
        )

    def forward(self, states_SE: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.proj(states_SE)
        return embedded


class OutputHead(nn.Module):
    """Final modulation and projection to the (ph, pw, channel) values of each token's patch, in
    fp32.
    """

    def __init__(self, config: WanConfig, fused_ops: FusedOps) -> None:
        super().__init__()
        self.eps = config.eps
        self.fused_ops = fused_ops
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim), requires_grad=False)
        patch = config.patch_size[1] * config.patch_size[2]
        self.head = nn.Linear(config.dim, config.out_channels * patch)

    def forward(self, x_BTD: torch.Tensor, times: TimestepEmbeddings) -> torch.Tensor:
        shift, scale = times.plus(self.modulation)
        hidden = self.fused_ops.modulated_norm(x_BTD, shift, scale, self.eps, torch.float32)
        return linear_fp32(self.head, hidden)


def embed_time(
    timesteps: Sequence[float],
    freq_dim: int,
    time_embedding: nn.Sequential,
    time_projection: nn.Sequential,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the timesteps' embeddings e [B, D] and their six modulation vectors E [B, 6, D],
    fp32.
    """
    half = freq_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.tensor(timesteps, dtype=torch.float64), frequencies)
    sinusoid = torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device, non_blocking=True)
    hidden = functional.silu(linear_fp32(time_embedding[0], sinusoid))
    time_BD = linear_fp32(time_embedding[2], hidden)
    return time_BD, linear_fp32(time_projection[1], functional.silu(time_BD)).unflatten(1, (6, -1))


def patchify(x: torch.Tensor) -> torch.Tensor:
    """Rearrange latents [c, F, h, w] to tokens [F * h/2 * w/2, c * 4]. Each token contains 2x2
    cells in the order (channel, row, column).
    """
    channels, frames, height, width = x.shape
    cells = x.view(channels, frames, height // 2, 2, width // 2, 2)
    return cells.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * 4)


def unpatchify(tokens_BLP: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Rearrange predictions [B, L, 4 * c] to latents [B, c, F, h, w]. The tokens have the same
    order as in `patchify`, but each token's values have the order (row, column, channel).
    """
    frames, height, width = size
    cells = tokens_BLP.view(-1, frames, height // 2, width // 2, 2, 2, tokens_BLP.shape[-1] // 4)
    return cells.permute(0, 6, 1, 2, 4, 3, 5).reshape(
        tokens_BLP.shape[0], -1, frames, height, width
    )


def linear_fp32(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a linear layer in fp32. The module itself is called, so that LoRA hooks take effect."""
    assert isinstance(layer, nn.Linear)
    result: torch.Tensor = functional_call(
        layer, {"weight": layer.weight.float(), "bias": layer.bias.float()}, (x,)
    )
    return result


def squares_of_all_ranks(
    fused_ops: FusedOps, parallel: ParallelContext, *parts: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Return each tensor's sum of squares over the channels of all ranks, using one collective for
    all tensors. If every rank has all channels, return None for each tensor.
    """
    if parallel.tensor_size == 1:
        return [None] * len(parts)
    return parallel.all_reduce(
        torch.cat([fused_ops.sum_of_squares(part) for part in parts], dim=-1)
    ).split(1, dim=-1)


def stack_inputs(parts: Sequence[Input]) -> Input:
    """Apply `stack` to linear layer inputs. Either all of the inputs or none of them must be
    quantized.
    """
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    if plain:
        return stack(plain)
    whole = [part for part in parts if isinstance(part, QuantizedActivation)]
    return quantized(
        stack([part.data for part in whole]),
        stack([part.scale for part in whole]),
        whole[0].orig_dtype,
    )
