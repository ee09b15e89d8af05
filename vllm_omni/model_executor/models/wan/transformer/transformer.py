# SPDX-License-Identifier: Apache-2.0
"""Base class of the Wan diffusion transformers: one rank's layers, and the forward pass for a
batch.

A rank holds a tensor-parallel shard or a pipeline stage, or it processes some of the tokens. The
transformer does not depend on sessions, requests or schedules. Each model family defines its input
channels (`WanTransformer.channels`) and overrides parts of the blocks where necessary (for example
`WanBlock.attend`).

Linear layers run in the model's dtype. Modulation, gates, normalisation, rotation, the time MLPs,
the head and (by default) the residual stream run in fp32.
"""

# B batch entries, L tokens of an entry, T of them on this rank, D width, N heads (of this rank
# where sharded), H head dim, C = H/2 rotary channels, S text tokens

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.offloader import get_offloader

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.attention.attention import stack
from vllm_omni.model_executor.layers.attention.rope import rope_tables
from vllm_omni.model_executor.layers.collectives.head_exchange import head_exchange
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, StageNetwork
from vllm_omni.model_executor.layers.kv_cache.window import WindowAttention
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    LinearPrecision,
    RowLinear,
    gelu_of,
)
from vllm_omni.model_executor.layers.linear.quantized_input import Input, takes_quantized
from vllm_omni.model_executor.models.wan.architecture import WanConfig
from vllm_omni.model_executor.models.wan.transformer.fused_ops import FusedOps
from vllm_omni.model_executor.models.wan.transformer.layers import (
    AttentionItem,
    CrossAttention,
    PatchEmbedding,
    SelfAttention,
    patchify,
)
from vllm_omni.model_executor.models.wan.transformer.timesteps import TimestepEmbeddings

Config = TypeVar("Config", bound=WanConfig)

Update = tuple[torch.Tensor, torch.Tensor]
"""A pending addition to the residual stream: a block's FFN result [B, T, D], and the gate for this
result.
"""


class WanItem(AttentionItem, Protocol):
    """One batch entry in a forward pass. `rope` contains the fp32 rotary tables (cos_TC, sin_TC)
    for this rank's tokens.
    """

    @property
    def rope(self) -> tuple[torch.Tensor, torch.Tensor]: ...


class FeedForward(nn.Sequential):
    """Two linear layers with GELU in between. If possible, GELU is fused into the first layer's
    matrix product or into the quantization of the second layer's input.
    """

    def __init__(
        self,
        config: WanConfig,
        parallel: ParallelContext,
        fused_ops: FusedOps,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        up = ColumnLinear(config.dim, config.ffn_dim, parallel, quant_config, f"{prefix}.0")
        down = RowLinear(config.ffn_dim, config.dim, parallel, quant_config, f"{prefix}.2")
        super().__init__(up, nn.GELU(approximate="tanh"), down)
        self.fused_ops = fused_ops

    def forward(self, x_BTD: Input) -> torch.Tensor:
        up, _, down = self
        assert isinstance(up, ColumnLinear)
        between = (
            self.fused_ops.gelu_to_fp8(up(x_BTD)) if takes_quantized(down) else gelu_of(up, x_BTD)
        )
        result: torch.Tensor = down(between)
        return result


class WanBlock(nn.Module):
    """One transformer block. `index` is the block's index within this stage."""

    def __init__(
        self,
        config: WanConfig,
        parallel: ParallelContext,
        fused_ops: FusedOps,
        index: int,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__()
        dim = config.dim
        self.index = index
        self.eps = config.eps
        self.fused_ops = fused_ops
        self.modulation = nn.Parameter(torch.empty(1, 6, dim), requires_grad=False)
        self.self_attn = SelfAttention(
            config, parallel, fused_ops, quant_config, f"{prefix}.self_attn"
        )
        self.norm3 = nn.LayerNorm(dim, eps=config.eps)
        self.cross_attn = CrossAttention(
            config, parallel, fused_ops, quant_config, f"{prefix}.cross_attn"
        )
        self.ffn = FeedForward(config, parallel, fused_ops, quant_config, f"{prefix}.ffn")

    def takes_quantized(self) -> bool:
        """Return whether all layers that read the self-attention input accept FP8 inputs."""
        return takes_quantized(self.self_attn.qkv)

    def attend(
        self,
        hidden_BTD: Input,
        items: Sequence[Any],
        rope: tuple[torch.Tensor, torch.Tensor],
        exchange: WindowAttention,
        write_only: bool,
    ) -> torch.Tensor | None:
        """Return the self-attention result before gating. The arguments are those of
        `SelfAttention`.
        """
        attended: torch.Tensor | None = self.self_attn(
            hidden_BTD, items, rope, self.index, exchange, write_only
        )
        return attended

    def after_self_attention(
        self,
        x_BTD: torch.Tensor,
        attended_BTD: torch.Tensor,
        gate: torch.Tensor,
        items: Sequence[Any],
    ) -> tuple[torch.Tensor, Input]:
        """Add the gated self-attention result to the residual stream. Return the residual stream
        and the cross-attention input.
        """
        norm3, quantized = self.norm3, takes_quantized(self.cross_attn.q)
        return self.fused_ops.after_self_attention(
            x_BTD, attended_BTD, gate, norm3.weight, norm3.bias, self.eps, None, quantized
        )

    def after_cross_attention(
        self,
        x_BTD: torch.Tensor,
        attended_BTD: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        items: Sequence[Any],
    ) -> tuple[torch.Tensor, Input]:
        """Add the cross-attention result to the residual stream. Return the residual stream and the
        FFN input.
        """
        quantized = takes_quantized(self.ffn[0])
        return self.fused_ops.after_cross_attention(
            x_BTD, attended_BTD, shift, scale, self.eps, quantized
        )

    def forward(
        self,
        x_BTD: torch.Tensor,
        update: Update | None,
        items: Sequence[WanItem],
        time: TimestepEmbeddings,
        rope: tuple[torch.Tensor, torch.Tensor],
        exchange: WindowAttention,
        write_only: bool,
    ) -> tuple[torch.Tensor, Update | None]:
        """Run one block. Both its input and its output consist of the residual stream and a pending
        update.

        The update is left to the next block, which can add and normalise in one pass over memory.
        If `write_only` is true, the block stops after writing the K/V.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = time.plus(self.modulation)
        dtype, quantized, x = self.norm3.weight.dtype, self.takes_quantized(), x_BTD
        if update is None:
            hidden = self.fused_ops.modulated_norm(x, shift1, scale1, self.eps, dtype, quantized)
        else:
            x, hidden = self.fused_ops.after_ffn(
                x, *update, shift1, scale1, self.eps, dtype, quantized
            )
        attended = self.attend(hidden, items, rope, exchange, write_only)
        if attended is None:
            return x, None
        x, hidden = self.after_self_attention(x, attended, gate1, items)
        x, hidden = self.after_cross_attention(
            x, self.cross_attn(hidden, items, self.index), shift2, scale2, items
        )
        return x, (self.ffn(hidden), gate2)


class WanTransformer(StageNetwork, Generic[Config]):
    """One rank's layers of a network, except for the head. The constructor creates uninitialised
    parameters with torch's default dtype, on torch's default device.

    Args:
        config: The network's dimensions.
        parallel: This rank's parallelism. Default: one rank.
        fused_ops: Fused pointwise ops.
        residual_fp32: Whether to keep the residual stream in fp32 instead of the model's dtype.
        quantization: vLLM's config for the blocks' linear layers, except for the layers in
            `high_precision` and `int8_weights`.
        prefix: Name of the network in the pipeline. Quantization configs refer to this name.
    """

    block_type: ClassVar[type[WanBlock]] = WanBlock
    """Class of the blocks."""
    high_precision: ClassVar[tuple[str, ...]] = ()
    """`fnmatch` patterns for the blocks' linear layers that are never quantized. The embeddings,
    time and text layers, modulation and head are not quantized either, because they are plain torch
    layers.
    """
    int8_weights: ClassVar[tuple[str, ...]] = ()
    """`fnmatch` patterns for the blocks' linear layers that use int8 weights and unquantized
    inputs.
    """

    def __init__(
        self,
        config: Config,
        parallel: ParallelContext | None,
        fused_ops: FusedOps,
        *,
        residual_fp32: bool,
        quantization: QuantizationConfig | None = None,
        prefix: str = "transformer",
    ) -> None:
        super().__init__()
        parallel = parallel or ParallelContext()
        parallel.check_divisible(config.num_heads, "num_heads")
        if not parallel.sequence_parallel:
            parallel.check_divisible(config.ffn_dim, "ffn_dim")
        if parallel.num_stages > config.num_layers:
            raise ValueError(
                f"{config.num_layers} layers can not be cut into {parallel.num_stages} "
                "pipeline stages"
            )
        self.config = config
        self.parallel = parallel
        self.residual_fp32 = residual_fp32
        dim = config.dim
        if parallel.first_stage:
            self.patch_embedding = PatchEmbedding(config)
        self._add_context_layers()
        self.time_embedding = nn.Sequential(
            nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.prefix = prefix
        retained, int8 = (
            [f"{prefix}.{name}" for name in names]
            for names in (self.high_precision, self.int8_weights)
        )
        self.quant_config = LinearPrecision(quantization, retained, int8)
        layers = parallel.layers(config.num_layers)
        made = (self._block(layer, index, fused_ops) for index, layer in enumerate(layers))
        self.blocks = nn.ModuleDict(
            dict(zip(map(str, layers), get_offloader().wrap_modules(made), strict=True))
        )

    def _block(self, layer: int, index: int, fused_ops: FusedOps) -> WanBlock:
        """Build a block without weights. `layer` is the block's index in the whole network, and
        `index` is its index in this stage.
        """
        name, block = f"{self.prefix}.blocks.{layer}", self._block_type(layer)
        return block(self.config, self.parallel, fused_ops, index, self.quant_config, name)

    def _block_type(self, layer: int) -> type[WanBlock]:
        return self.block_type

    def _add_context_layers(self) -> None:
        """Build the layers that `embed_context` uses."""
        text_dim, dim = self.config.text_dim, self.config.dim
        self.text_embedding = nn.Sequential(
            nn.Linear(text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )

    def embed_context(self, text_SE: torch.Tensor) -> torch.Tensor:
        """Project an encoder's embeddings to the input [S, D] for cross-attention keys and
        values.
        """
        embedded: torch.Tensor = self.text_embedding(text_SE)
        return embedded

    @property
    def typed_weight(self) -> torch.Tensor:
        layer = self.time_embedding[0]
        assert isinstance(layer, nn.Linear)
        return layer.weight

    @property
    def num_local_layers(self) -> int:
        return len(self.blocks)

    @property
    def num_cache_heads(self) -> int:
        """Return the number of heads in this rank's self-attention K/V cache."""
        return self.config.num_heads // self.parallel.size

    @property
    def num_cross_heads(self) -> int:
        """Return the number of heads in this rank's cross-attention K/V. Under sequence
        parallelism, every rank has all heads.
        """
        return self.config.num_heads // self.parallel.tensor_size

    @property
    def cross_kv_nbytes(self) -> int:
        """Return the size in bytes of one prompt's `cross_attention_kv`."""
        elements = self.num_cross_heads * self.config.head_dim * self.config.text_len
        return 2 * self.num_local_layers * elements * self.dtype.itemsize

    def num_tokens(self, latents: torch.Tensor) -> int:
        """Return the number of tokens L in a chunk [channels, F, h, w]."""
        return latents[0].numel() // (self.config.patch_size[1] * self.config.patch_size[2])

    def rope(self, frames: range, size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary tables (cos_TC, sin_TC) for a chunk's tokens on this rank, fp32. `size`
        is the latents' shape, [channels, F, h, w].
        """
        _, patch_height, patch_width = self.config.patch_size
        cos, sin = rope_tables(
            self.config.head_dim, frames, size[2] // patch_height, size[3] // patch_width
        )
        own = self.parallel.token_slice(len(cos))
        return to_device(cos[own], self.device), to_device(sin[own], self.device)

    def channels(self, item: Any) -> torch.Tensor:
        """Return the first stage's input for a batch entry as a contiguous tensor [in_channels, F,
        h, w].
        """
        raise NotImplementedError

    def embed(self, items: Sequence[Any], own: slice) -> torch.Tensor:
        """Return the first stage's embeddings [B, T, D] of the tokens in `own`, for each batch
        entry.
        """
        tokens = stack([patchify(self.channels(item))[own] for item in items])
        embedded: torch.Tensor = self.patch_embedding(tokens)
        return embedded

    def cross_attention_kv(self, text_SE: torch.Tensor) -> torch.Tensor:
        """Return the cross-attention K/V [layers, 2, text_len, N, H] that this stage's blocks
        compute from text embeddings.

        Shorter prompts are padded with zeros. As in the original, cross-attention also attends to
        the padding. This method is collective under tensor parallelism.

        Raises:
            ValueError: The prompt is longer than `text_len`, or its embeddings have the wrong
                width.
        """
        items, width = text_SE.shape
        text_len, text_dim = self.config.text_len, self.config.text_dim
        if items > text_len or width != text_dim:
            raise ValueError(f"text must be [<= {text_len}, {text_dim}], got {items}x{width}")
        padded = functional.pad(text_SE.to(self.device, self.dtype), (0, 0, 0, text_len - items))
        text_SD = self.embed_context(padded)
        return torch.stack([block.cross_attn.keys_values(text_SD) for block in self._blocks()])

    def through_blocks(
        self,
        items: Sequence[Any],
        hidden_BTD: torch.Tensor | None,
        time: TimestepEmbeddings,
        num_tokens: int,
        *,
        kv_only: bool = False,
    ) -> torch.Tensor:
        """Run this stage's blocks. On the first stage (`hidden_BTD` is None), embed the batch
        first.

        This method is collective under tensor or sequence parallelism.

        Args:
            items: Batch entries with equal F, h, w.
            hidden_BTD: Result of the previous stage. None on the first stage.
            time: Timestep embeddings with six vectors each.
            num_tokens: Number of tokens L in a batch entry, across all ranks.
            kv_only: Whether the last stage stops after its last K/V write.

        Returns:
            Hidden states [B, T, D].
        """
        if hidden_BTD is None:
            x = self.embed(items, self.parallel.token_slice(num_tokens))
            x = x.float() if self.residual_fp32 else x
        else:
            x = hidden_BTD
        rope = (stack([item.rope[0] for item in items]), stack([item.rope[1] for item in items]))
        exchange = WindowAttention()
        if self.parallel.sequence_parallel:
            exchange = head_exchange(self.parallel, items, num_tokens)
        last = self.num_local_layers - 1
        update = None
        for block in self._blocks():
            stop = kv_only and self.parallel.last_stage and block.index == last
            x, update = block(x, update, items, time, rope, exchange, stop)
        return x if update is None else self._blocks()[-1].fused_ops.gated_add(x, *update)

    def empty_block(self, layer: int) -> WanBlock:
        return self._block(layer, layer, self._blocks()[0].fused_ops)

    def move_layers(self, move: LayerMove) -> None:
        super().move_layers(move)
        for index, block in enumerate(self._blocks()):
            block.index = index

    def _blocks(self) -> list[Any]:
        return list(self.blocks.values())
