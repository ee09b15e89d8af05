# SPDX-License-Identifier: Apache-2.0
"""The Wan 2.1 text-to-video transformer with explicit keys and values: one forward for several streams' chunks.

Owns the network's parameters and maths for this rank (a tensor-parallel part, a pipeline stage, or a token part) and
nothing of sessions, requests or schedules. A row attends to whatever its window shows it, without a mask: causality is
in the window's content, and a window that holds just the row's own frames makes this the bidirectional Wan.

No step of the forward waits for the device: slots and lengths are host integers, what depends on the timestep is kept
on the device by timestep. Maths: guandeh17/Self-Forcing @ 33593df, wan/modules/causal_model.py.
Held by tests/model_executor/models/causal_wan/test_causal_wan_parallel.py.
"""

# B rows (one chunk of one session each), L tokens of a chunk, T of them on this rank, D width, N heads (of this rank
# where sharded), H head dim, C = H/2 rotary lanes, S text tokens

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.chains import Chains
from vllm_omni.model_executor.models.wan.layers import (
    CrossAttention,
    Head,
    KVView,
    PatchEmbedding,
    SelfAttention,
    embed_time,
    patchify,
    stack,
    unpatchify,
)

_KEPT_TIMESTEPS = 128
"""Timesteps whose embedding is kept: 43 KiB each at 1.3B; the motion controller alone has 101 values."""


@dataclass(frozen=True)
class ChunkRow:
    """What one row of a forward brings; tensors on the model's device, made once per chunk except `latents`.

    latents: fp32 [16, F, h, w], noisy (or clean, at the context timestep). timestep: in [0, 1000]. frames: absolute
    latent frames of the chunk. rope: (cos_TC, sin_TC) fp32. cross_kv: [layers, 2, S, N, H] of `cross_attention_kv`.
    window: written at `frames`. Layers are those of this stage.
    """

    latents: torch.Tensor
    timestep: float
    frames: range
    rope: tuple[torch.Tensor, torch.Tensor]
    cross_kv: torch.Tensor
    window: KVView


class Block(nn.Module):
    """One transformer block; `index` is its place among this stage's blocks."""

    def __init__(self, config: CausalWanConfig, parallel: ParallelContext, chains: Chains, index: int) -> None:
        super().__init__()
        dim = config.dim
        self.index = index
        self.eps = config.eps
        self.chains = chains
        self.modulation = nn.Parameter(torch.empty(1, 6, dim), requires_grad=False)
        self.self_attn = SelfAttention(config, parallel, chains)
        self.norm3 = nn.LayerNorm(dim, eps=config.eps)
        self.cross_attn = CrossAttention(config, parallel, chains)
        self.ffn = nn.Sequential(
            ColumnParallelLinear(dim, config.ffn_dim, parallel),
            nn.GELU(approximate="tanh"),
            RowParallelLinear(config.ffn_dim, dim, parallel),
        )

    def forward(
        self,
        x_BTD: torch.Tensor,
        rows: Sequence[ChunkRow],
        time_B6D: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        num_tokens: int,
        write_only: bool,
    ) -> torch.Tensor:
        """One block; if `write_only`, stop once K/V are written and return `x_BTD` as it came."""
        chains, dtype, norm3 = self.chains, self.norm3.weight.dtype, self.norm3
        modulation = (self.modulation.float() + time_B6D).unsqueeze(2)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(1)
        hidden = chains.modulated_norm(x_BTD, shift1, scale1, self.eps, dtype)
        attended = self.self_attn(hidden, rows, rope, self.index, num_tokens, write_only)
        if attended is None:
            return x_BTD
        x, hidden = chains.after_self_attention(x_BTD, attended, gate1, norm3.weight, norm3.bias, self.eps)
        x, hidden = chains.after_cross_attention(x, self.cross_attn(hidden, rows, self.index), shift2, scale2, self.eps)
        return chains.gated_add(x, self.ffn(hidden), gate2)


class CausalWanTransformer(nn.Module):
    """This rank's part of the network. Parameters are created empty, in torch's default type and device."""

    def __init__(
        self,
        config: CausalWanConfig,
        parallel: ParallelContext | None = None,
        *,
        residual_fp32: bool = True,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        parallel = parallel or ParallelContext()
        parallel.check_divisible(config.num_heads, "num_heads")
        if not parallel.sequence_parallel:
            parallel.check_divisible(config.ffn_dim, "ffn_dim")
        if parallel.num_stages > config.num_layers:
            raise ValueError(f"{config.num_layers} layers can not be cut into {parallel.num_stages} pipeline stages")
        self.config = config
        self.parallel = parallel
        self.residual_fp32 = residual_fp32
        dim = config.dim
        chains = Chains.build(compiled)
        if parallel.first_stage:
            self.patch_embedding = PatchEmbedding(config)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        layers = parallel.layers(config.num_layers)
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, parallel, chains, index) for index, layer in enumerate(layers)}
        )
        if parallel.last_stage:
            self.head = Head(config, chains)
        self.requires_grad_(False)
        self._times: OrderedDict[float, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    @property
    def _text_weight(self) -> torch.Tensor:
        layer = self.text_embedding[0]
        assert isinstance(layer, nn.Linear)
        return layer.weight

    @property
    def dtype(self) -> torch.dtype:
        return self._text_weight.dtype

    @property
    def device(self) -> torch.device:
        return self._text_weight.device

    @property
    def num_local_layers(self) -> int:
        return len(self.blocks)

    @property
    def num_cache_heads(self) -> int:
        """Heads whose self-attention K/V this rank keeps."""
        return self.config.num_heads // self.parallel.size

    @property
    def cross_kv_nbytes(self) -> int:
        """Bytes of one prompt's `cross_attention_kv` (all heads under sequence parallelism)."""
        heads = self.config.num_heads // self.parallel.tensor_size
        elements = heads * self.config.head_dim * self.config.text_len
        return 2 * self.num_local_layers * elements * self.dtype.itemsize

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def num_tokens(self, latents: torch.Tensor) -> int:
        """Return L of a [channels, F, h, w] chunk."""
        return latents[0].numel() // (self.config.patch_size[1] * self.config.patch_size[2])

    def forget(self) -> None:
        """Drop everything derived from weights (they were loaded anew or moved)."""
        self._times.clear()

    def cross_attention_kv(self, text_SE: torch.Tensor) -> torch.Tensor:
        """Encoded prompt (at most text_len rows) -> K/V [layers, 2, text_len, N, H] of this stage's blocks.

        Missing rows are zero and take part in attention, as in the original. Collective under tensor parallelism.
        Raises ValueError if the prompt has more rows than text_len or another width.
        """
        rows, width = text_SE.shape
        if rows > self.config.text_len or width != self.config.text_dim:
            raise ValueError(f"text must be [<= {self.config.text_len}, {self.config.text_dim}], got {rows}x{width}")
        padded = functional.pad(text_SE.to(self.device, self.dtype), (0, 0, 0, self.config.text_len - rows))
        text_SD = self.text_embedding(padded)
        return torch.stack([block.cross_attn.keys_values(text_SD) for block in self._blocks()])

    def forward(
        self, rows: Sequence[ChunkRow], hidden_BTD: torch.Tensor | None = None, *, kv_only: bool = False
    ) -> torch.Tensor:
        """Predict the flow eps - x0 of every row, [B, 16, F, h, w] fp32, and write each row's K/V at its frames.

        Rows share F, h, w. `hidden_BTD` is the previous stage's result; stages before the last return theirs.
        `kv_only` (no row's prediction is needed): the last stage stops after its last K/V write and returns zeros.
        Collective under tensor and sequence parallelism.
        """
        latents = rows[0].latents
        num_tokens = self.num_tokens(latents)
        own = self.parallel.token_slice(num_tokens)
        if hidden_BTD is None:
            x = self.patch_embedding(stack([patchify(row.latents)[own] for row in rows]))
            x = x.float() if self.residual_fp32 else x
        else:
            x = hidden_BTD
        times = [self._time(row.timestep) for row in rows]
        time_B6D = stack([modulation for _, modulation in times])
        rope = (stack([row.rope[0] for row in rows]), stack([row.rope[1] for row in rows]))
        last = self.num_local_layers - 1
        for block in self._blocks():
            stop = kv_only and self.parallel.last_stage and block.index == last
            x = block(x, rows, time_B6D, rope, num_tokens, stop)
        if not self.parallel.last_stage:
            return x
        if kv_only:
            return latents.new_zeros(len(rows), *latents.shape)
        patches = self.parallel.gather_tokens(self.head(x, stack([time for time, _ in times])), num_tokens)
        return unpatchify(patches, latents.shape[1:])

    def _time(self, timestep: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return e [D] and its six modulation rows E [6, D] of a timestep, fp32; computed once."""
        known = self._times.get(timestep)
        if known is None:
            time_BD, time_B6D = embed_time(
                [timestep], self.config.freq_dim, self.time_embedding, self.time_projection, self.device
            )
            while len(self._times) >= _KEPT_TIMESTEPS:
                self._times.popitem(last=False)
            known = self._times[timestep] = (time_BD[0], time_B6D[0])
        self._times.move_to_end(timestep)
        return known
