# SPDX-License-Identifier: Apache-2.0
"""The causal diffusion transformer of LingBot-World-Fast: one forward for several sessions' chunks.

Owns the network's parameters and maths for this rank (a tensor-parallel part, a pipeline stage, or a token part) and
nothing of sessions, requests or schedules: each row of a batch brings its own K/V window, camera modulation and
cross-attention K/V. Maths: Robbyant/lingbot-world @ a43bec7, wan/modules/model_fast.py.

Precision: linear layers run in the model's type; the residual stream (unless told otherwise), modulation, gates,
normalisation, rotation, the time MLPs and the head run in fp32. In an fp32 model everything is fp32.
"""

# B rows (one chunk of one session each), L tokens of a chunk, T of them on this rank, D width, N heads (of this rank
# where sharded), H head dim, C = H/2 rotary lanes, S text tokens

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.kv_cache import KVWindow
from vllm_omni.model_executor.layers.parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear
from vllm_omni.model_executor.models.lingbot_world.chains import LingBotChains
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.wan.layers import (
    CrossAttention,
    Head,
    PatchEmbedding,
    SelfAttention,
    embed_time,
    patchify,
    stack,
    unpatchify,
)


@dataclass(frozen=True)
class ChunkRow:
    """What one row of a forward brings; tensors on the model's device, made once per chunk except `latents`.

    latents: fp32 [16, F, h, w], noisy (or clean, at timestep 0). condition: [20, F, h, w], needed on the first
    stage. timestep: in [0, 1000].
    frames: absolute latent frames of the chunk. rope: (cos_TC, sin_TC) fp32. camera: [layers, 2, T, D], the factors
    and shifts of `camera_modulation`. cross_kv: [layers, 2, S, N, H] of `cross_attention_kv`. window: written at
    `frames`. Layers are those of this stage.
    """

    latents: torch.Tensor
    condition: torch.Tensor | None
    timestep: float
    frames: range
    rope: tuple[torch.Tensor, torch.Tensor]
    camera: torch.Tensor
    cross_kv: torch.Tensor
    window: KVWindow


class Block(nn.Module):
    """One transformer block; `index` is its place among this stage's blocks."""

    def __init__(
        self, config: LingBotWorldConfig, parallel: ParallelContext, chains: LingBotChains, index: int
    ) -> None:
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
        self.cam_injector_layer1 = ColumnParallelLinear(dim, dim, parallel)
        self.cam_injector_layer2 = RowParallelLinear(dim, dim, parallel)
        self.cam_scale_layer = ColumnParallelLinear(dim, dim, parallel)
        self.cam_shift_layer = ColumnParallelLinear(dim, dim, parallel)
        self.parallel = parallel

    def camera_modulation(self, camera_TD: torch.Tensor, out_2TD: torch.Tensor) -> None:
        """Write the block's camera factor (1 + scale) and shift into `out_2TD`."""
        hidden = self.cam_injector_layer2(functional.silu(self.cam_injector_layer1(camera_TD))) + camera_TD
        out_2TD[0] = 1 + self.parallel.all_gather_channels(self.cam_scale_layer(hidden))
        out_2TD[1] = self.parallel.all_gather_channels(self.cam_shift_layer(hidden))

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
        chains, dtype = self.chains, self.norm3.weight.dtype
        modulation = (self.modulation.float() + time_B6D).unsqueeze(2)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(1)
        hidden = chains.modulated_norm(x_BTD, shift1, scale1, self.eps, dtype)
        attended = self.self_attn(hidden, rows, rope, self.index, num_tokens, write_only)
        if attended is None:
            return x_BTD
        camera_injected = [
            chains.after_self_attention(
                x_TD, update_TD, gate, *row.camera[self.index], self.norm3.weight, self.norm3.bias, self.eps
            )
            for row, x_TD, update_TD, gate in zip(rows, x_BTD, attended, gate1, strict=True)
        ]
        x = stack([x_TD for x_TD, _ in camera_injected])
        hidden = stack([hidden_TD for _, hidden_TD in camera_injected])
        x, hidden = chains.after_cross_attention(x, self.cross_attn(hidden, rows, self.index), shift2, scale2, self.eps)
        return chains.gated_add(x, self.ffn(hidden), gate2)


class LingBotTransformer(nn.Module):
    """This rank's part of the network. Parameters are created empty, in torch's default type and device."""

    def __init__(
        self,
        config: LingBotWorldConfig,
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
        dim, patch = config.dim, config.patch_size[1] * config.patch_size[2]
        chains = LingBotChains.build(compiled)
        if parallel.first_stage:
            self.patch_embedding = PatchEmbedding(config)
        self.patch_embedding_wancamctrl = nn.Linear(config.camera_channels * patch, dim)
        self.c2ws_hidden_states_layer1 = nn.Linear(dim, dim)
        self.c2ws_hidden_states_layer2 = nn.Linear(dim, dim)
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

    @property
    def dtype(self) -> torch.dtype:
        return self.c2ws_hidden_states_layer1.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.c2ws_hidden_states_layer1.weight.device

    @property
    def num_local_layers(self) -> int:
        return len(self.blocks)

    @property
    def num_cache_heads(self) -> int:
        """Heads whose self-attention K/V this rank keeps."""
        return self.config.num_heads // self.parallel.size

    @property
    def num_cross_heads(self) -> int:
        """Heads whose cross-attention K/V this rank keeps (all of them under sequence parallelism)."""
        return self.config.num_heads // self.parallel.tensor_size

    @property
    def cross_kv_nbytes(self) -> int:
        """Bytes of one prompt's `cross_attention_kv`."""
        elements = self.num_cross_heads * self.config.head_dim * self.config.text_len
        return 2 * self.num_local_layers * elements * self.dtype.itemsize

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def num_tokens(self, latents: torch.Tensor) -> int:
        """Return L of a [channels, F, h, w] chunk."""
        return latents[0].numel() // (self.config.patch_size[1] * self.config.patch_size[2])

    # once per prompt, once per chunk

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

    def camera_modulation(self, camera: torch.Tensor) -> torch.Tensor:
        """Camera map [384, F, h, w] -> [layers, 2, T, D] in the model's type: each block's factor and shift.

        The same for every denoise step of a chunk. One buffer (3.57 GiB at full size, 480x832), freed with the chunk
        and taken up again by the next through torch's allocator. Collective under tensor parallelism.
        """
        tokens = patchify(camera)[self.parallel.token_slice(self.num_tokens(camera))]
        patches_TD = self.patch_embedding_wancamctrl(tokens.to(self.device, self.dtype))
        hidden = self.c2ws_hidden_states_layer2(functional.silu(self.c2ws_hidden_states_layer1(patches_TD)))
        camera_TD = patches_TD + hidden
        out = camera_TD.new_empty(self.num_local_layers, 2, *camera_TD.shape)
        for block, out_2TD in zip(self._blocks(), out, strict=True):
            block.camera_modulation(camera_TD, out_2TD)
        return out

    # every step

    def forward(
        self, rows: Sequence[ChunkRow], hidden_BTD: torch.Tensor | None = None, *, kv_only: bool = False
    ) -> torch.Tensor:
        """Predict the flow eps - x0 of every row, [B, 16, F, h, w] fp32, and write each row's K/V at its frames.

        Rows share F, h, w. `hidden_BTD` is the previous stage's result; stages before the last return theirs.
        `kv_only` (all rows are at the clean-context pass): the last stage stops after its last K/V write and returns
        zeros. Collective under tensor and sequence parallelism.
        """
        num_tokens = self.num_tokens(rows[0].latents)
        own = self.parallel.token_slice(num_tokens)
        if hidden_BTD is None:
            tokens = [patchify(_with_condition(row))[own] for row in rows]
            x = self.patch_embedding(stack(tokens))
            x = x.float() if self.residual_fp32 else x
        else:
            x = hidden_BTD
        time_BD, time_B6D = self._time_embedding([row.timestep for row in rows])
        rope = (stack([row.rope[0] for row in rows]), stack([row.rope[1] for row in rows]))
        last = self.num_local_layers - 1
        for block in self._blocks():
            stop = kv_only and self.parallel.last_stage and block.index == last
            x = block(x, rows, time_B6D, rope, num_tokens, stop)
        if not self.parallel.last_stage:
            return x
        latents = rows[0].latents
        if kv_only:
            return latents.new_zeros(len(rows), *latents.shape)
        patches = self.parallel.gather_tokens(self.head(x, time_BD), num_tokens)
        return unpatchify(patches, latents.shape[1:])

    def _time_embedding(self, timesteps: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return e [B, D] and its six modulation rows E [B, 6, D], fp32."""
        return embed_time(timesteps, self.config.freq_dim, self.time_embedding, self.time_projection, self.device)


def _with_condition(row: ChunkRow) -> torch.Tensor:
    """Return the 36 input channels: noisy latents, then mask and condition."""
    assert row.condition is not None, "the first stage needs the condition"
    return torch.cat((row.latents, row.condition.to(row.latents)))
