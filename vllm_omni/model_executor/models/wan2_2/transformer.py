# SPDX-License-Identifier: Apache-2.0
"""The bidirectional Wan transformer of Wan 2.1 and 2.2: one forward for several videos at different timesteps.

Owns one network's parameters and maths for this rank (a tensor-parallel part, a pipeline stage, or a token part) and
nothing of requests, guidance or schedules. A row sees all of its own tokens and its prompt's 512 rows. Some leading
latent frames of a row may be clean: their tokens are fed timestep 0 (Wan 2.2's `expand_timesteps`).

Maths: diffusers `WanTransformer3DModel` 0.42 (Wan-Video/Wan2.2, wan/modules/model.py).
Held by tests/model_executor/models/wan2_2/test_wan22_parity.py.
"""

# B rows (one branch of one request each), L tokens of a video, T of them on this rank, D width, S text tokens, N heads
# (of this rank where sharded), H head dim, C = H/2 rotary lanes

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear
from vllm_omni.model_executor.models.wan.chains import Chains
from vllm_omni.model_executor.models.wan.layers import (
    CrossAttention,
    PatchEmbedding,
    SelfAttention,
    embed_time,
    linear_fp32,
    patchify,
    stack,
    unpatchify,
)
from vllm_omni.model_executor.models.wan2_2.config import TEXT_LEN, Wan22Config


class OwnTokens:
    """The K/V "window" of a bidirectional network: attention reads back what the same layer has just written."""

    def __init__(self) -> None:
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, layer: int, frames: range, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        self._kv = (k_TNH, v_TNH)

    def visible(self, layer: int, frames: range) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._kv is not None
        kv, self._kv = self._kv, None
        return kv


@dataclass(frozen=True)
class VideoRow:
    """One row of a forward; tensors on the model's device.

    inputs: [in_channels, F, h, w], any float type. timestep: in [0, 1000], of all frames but the first `clean_frames`.
    rope: (cos_TC, sin_TC) fp32, this rank's tokens. cross_kv: [layers, 2, S, N, H] of `cross_attention_kv`.
    """

    inputs: torch.Tensor
    timestep: float
    rope: tuple[torch.Tensor, torch.Tensor]
    cross_kv: torch.Tensor
    clean_frames: int = 0
    window: OwnTokens = field(default_factory=OwnTokens)

    @property
    def frames(self) -> range:
        return range(self.inputs.shape[1])


@dataclass(frozen=True)
class Times:
    """The embedding of a forward's timesteps: of each row, and of timestep 0 for the tokens marked clean.

    row_BKD, clean_KD: K vectors each (1 for the head, 6 for a block), fp32. clean_BT1: bool; None = no token is clean.
    """

    row_BKD: torch.Tensor
    clean_KD: torch.Tensor | None = None
    clean_BT1: torch.Tensor | None = None

    def plus(self, table_1KD: torch.Tensor) -> list[torch.Tensor]:
        """Return table + time for each of the table's K rows, broadcastable to [B, T, D]; K or 1 vectors in `self`."""
        table = table_1KD.float()
        rows = (table + self.row_BKD).unsqueeze(2).unbind(1)
        if self.clean_BT1 is None or self.clean_KD is None:
            return list(rows)
        clean = (table[0] + self.clean_KD).unbind(0)
        return [torch.where(self.clean_BT1, one, row) for one, row in zip(clean, rows, strict=True)]


class Block(nn.Module):
    """One transformer block; `index` is its place among this stage's blocks."""

    def __init__(self, config: Wan22Config, parallel: ParallelContext, chains: Chains, index: int) -> None:
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
        rows: Sequence[VideoRow],
        times: Times,
        rope: tuple[torch.Tensor, torch.Tensor],
        num_tokens: int,
    ) -> torch.Tensor:
        chains, norm3 = self.chains, self.norm3
        shift1, scale1, gate1, shift2, scale2, gate2 = times.plus(self.modulation)
        hidden = chains.modulated_norm(x_BTD, shift1, scale1, self.eps, norm3.weight.dtype)
        attended = self.self_attn(hidden, rows, rope, self.index, num_tokens, False)
        x, hidden = chains.after_self_attention(x_BTD, attended, gate1, norm3.weight, norm3.bias, self.eps)
        x, hidden = chains.after_cross_attention(x, self.cross_attn(hidden, rows, self.index), shift2, scale2, self.eps)
        return chains.gated_add(x, self.ffn(hidden), gate2)


class Head(nn.Module):
    """Final modulation and projection to the (ph, pw, channel) values of each token's patch; fp32."""

    def __init__(self, config: Wan22Config, chains: Chains) -> None:
        super().__init__()
        self.eps = config.eps
        self.chains = chains
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim), requires_grad=False)
        patch = config.patch_size[1] * config.patch_size[2]
        self.head = nn.Linear(config.dim, config.out_channels * patch)

    def forward(self, x_BTD: torch.Tensor, times: Times) -> torch.Tensor:
        shift, scale = times.plus(self.modulation)
        return linear_fp32(self.head, self.chains.modulated_norm(x_BTD, shift, scale, self.eps, torch.float32))


class Wan22Transformer(nn.Module):
    """This rank's part of one network. Parameters are created empty, in torch's default type and device."""

    def __init__(
        self,
        config: Wan22Config,
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
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(config, parallel, chains, index)
                for index, layer in enumerate(parallel.layers(config.num_layers))
            }
        )
        if parallel.last_stage:
            self.head = Head(config, chains)
        self.requires_grad_(False)

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
    def cross_kv_nbytes(self) -> int:
        """Bytes of one prompt's `cross_attention_kv` (all heads under sequence parallelism)."""
        heads = self.config.num_heads // self.parallel.tensor_size
        return 2 * len(self.blocks) * heads * self.config.head_dim * TEXT_LEN * self.dtype.itemsize

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def cross_attention_kv(self, text_SE: torch.Tensor) -> torch.Tensor:
        """Encoded prompt (at most `TEXT_LEN` rows) -> K/V [layers, 2, TEXT_LEN, N, H] of this stage's blocks.

        Missing rows are zero and take part in attention, as in the original. Collective under tensor parallelism.
        """
        padded = functional.pad(text_SE.to(self.device, self.dtype), (0, 0, 0, TEXT_LEN - text_SE.shape[0]))
        text_SD = self.text_embedding(padded)
        return torch.stack([block.cross_attn.keys_values(text_SD) for block in self._blocks()])

    def forward(self, rows: Sequence[VideoRow], hidden_BTD: torch.Tensor | None = None) -> torch.Tensor:
        """Predict the flow eps - x0 of every row, [B, out_channels, F, h, w] fp32.

        Rows share F, h, w. `hidden_BTD` is the previous stage's result; stages before the last return theirs.
        Collective under tensor and sequence parallelism.
        """
        size = rows[0].inputs.shape[1:]
        num_tokens = size.numel() // (self.config.patch_size[1] * self.config.patch_size[2])
        own = self.parallel.token_slice(num_tokens)
        if hidden_BTD is None:
            x = self.patch_embedding(stack([patchify(row.inputs.contiguous())[own] for row in rows]))
            x = x.float() if self.residual_fp32 else x
        else:
            x = hidden_BTD
        head_times, block_times = self._times(rows, num_tokens // size[0], own)
        rope = (stack([row.rope[0] for row in rows]), stack([row.rope[1] for row in rows]))
        for block in self._blocks():
            x = block(x, rows, block_times, rope, num_tokens)
        if not self.parallel.last_stage:
            return x
        return unpatchify(self.parallel.gather_tokens(self.head(x, head_times), num_tokens), size)

    def _times(self, rows: Sequence[VideoRow], tokens_per_frame: int, own: slice) -> tuple[Times, Times]:
        """Return the embeddings for the head and for the blocks."""
        clean = any(row.clean_frames for row in rows)
        timesteps = [*(row.timestep for row in rows), *([0.0] if clean else [])]
        time, modulation = embed_time(
            timesteps, self.config.freq_dim, self.time_embedding, self.time_projection, self.device
        )
        rows_B1D = time[: len(rows)].unsqueeze(1)
        if not clean:
            return Times(rows_B1D), Times(modulation)
        frame_T = torch.arange(own.start, own.stop, device=self.device) // tokens_per_frame
        marks = torch.stack([frame_T < row.clean_frames for row in rows]).unsqueeze(-1)
        return Times(rows_B1D, time[-1:], marks), Times(modulation[: len(rows)], modulation[-1], marks)
