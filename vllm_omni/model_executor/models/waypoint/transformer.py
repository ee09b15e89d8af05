# SPDX-License-Identifier: Apache-2.0
"""Waypoint's causal world transformer: one latent frame a forward, velocity of a rectified flow.

A frame's tokens see each other and the kept frames of every layer's ring; nothing is masked. Noise level and controls
enter as one vector each: ada-RMS modulation, whose six projections all blocks share (a block only has biases), and a
small MLP in every few blocks. Waypoint-1 adds gates on heads and cross-attention to a prompt, 1.5 mixes the values of
its first layer into all others.

Maths: written from a description and recorded tensors of the original (README.md); none of its code.
Held by tests/model_executor/models/waypoint/test_waypoint_parity.py and test_waypoint_transformer.py.
"""

# B rows (one frame of one session each), T tokens of a frame, D width, N heads, H head dim, C = H/2 lane pairs, S rows
# of a prompt, E their width

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.attention import attention
from vllm_omni.model_executor.models.waypoint.config import NOISE_WIDTH, BiasIn, Tables, WaypointConfig
from vllm_omni.model_executor.models.waypoint.rings import FrameRings

_EPS = float(torch.finfo(torch.float32).eps)
"""Of every norm, whatever the model's type."""

Rotation = tuple[torch.Tensor, torch.Tensor]


def rms(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, computed in fp32, in the type of `x`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def rotate(x_BTNH: torch.Tensor, cos_BTC: torch.Tensor, sin_BTC: torch.Tensor) -> torch.Tensor:
    """Rotate lanes (2j, 2j + 1) and return all first components before all second ones. In the type of `x_BTNH`."""
    first, second = x_BTNH.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_BTC.unsqueeze(-2), sin_BTC.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x_BTNH.dtype)


def euler_step(
    x: torch.Tensor, velocity: torch.Tensor, sigmas: Sequence[float], step: int, dtype: torch.dtype
) -> torch.Tensor:
    """Move fp32 latents to the next noise level. dtype: the model's, to which the result is rounded."""
    return (x + (sigmas[step + 1] - sigmas[step]) * velocity).to(dtype).float()


def modulate(x_BTD: torch.Tensor, scale_B1D: torch.Tensor, bias_B1D: torch.Tensor) -> torch.Tensor:
    return rms(x_BTD) * (1 + scale_B1D) + bias_B1D


@dataclass(frozen=True)
class FrequencyTables:
    """Constants of the network, fp32 on the CPU. noise: [256]. xy: of a spatial axis's lanes. time: of the temporal's.

    kind `served`: rounded to bf16, as the original engine has them once its module is cast.
    """

    noise: torch.Tensor
    xy: torch.Tensor
    time: torch.Tensor

    @classmethod
    def of(cls, config: WaypointConfig, kind: Tables) -> "FrequencyTables":
        half = NOISE_WIDTH // 2
        noise = torch.pow(10000.0, -torch.arange(half, dtype=torch.float64) / (half - 1))
        spatial, temporal = config.head_dim // 8, config.head_dim // 4
        fastest = config.rope_nyquist_frac / 2 * min(config.height, config.width)
        xy = math.pi * torch.linspace(1.0, fastest, -(-spatial // 2), dtype=torch.float64)
        exponents = 2 * torch.arange(temporal // 2, dtype=torch.float64) / temporal
        time = torch.pow(config.rope_theta, -exponents)
        tables = [table.float() for table in (noise, xy.repeat_interleave(2)[:spatial], time.repeat_interleave(2))]
        if kind == "served":
            tables = [table.bfloat16().float() for table in tables]
        return cls(*tables)


@dataclass(frozen=True)
class FrameRow:
    """Inputs of one row of a forward; on the model's device.

    latents: fp32 [C, h, w]. sigma: noise level, 0 for the pass that makes the K/V that stay. frames: the frame's index,
    a range of one. rope: (cos, sin) [T, C] fp32, of `rope`. control: [control blocks, D] of `controls`. window: the
    session's, where every block writes. prompt_kv: [prompt blocks, 2, S, N, H] of `prompt_kv`.
    """

    latents: torch.Tensor
    sigma: float
    frames: range
    rope: Rotation
    control: torch.Tensor
    window: FrameRings
    prompt_kv: torch.Tensor | None = None


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(functional.silu(self.fc1(x)))
        return out


class SelfAttention(nn.Module):
    """Grouped-query attention of a frame over its ring. layer: absolute index."""

    def __init__(self, config: WaypointConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        dim, kv = config.d_model, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv, bias=False)
        self.v_proj = nn.Linear(dim, kv, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        if config.value_residual:
            self.v_lamb = nn.Parameter(torch.zeros(()))
        if config.gated_attn:
            self.gate_proj = nn.Linear(config.n_heads, config.n_heads, bias=False)

    def forward(
        self, a_BTD: torch.Tensor, first_v: torch.Tensor | None, rows: Sequence[FrameRow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (result, the values of the first layer). first_v: those, None in that layer itself."""
        q, k, v = (
            projection(a_BTD).unflatten(-1, (-1, self.config.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if first_v is None:
            first_v = v
        elif self.config.value_residual:
            v = v + self.v_lamb * (first_v - v)
        cos, sin = (torch.stack([row.rope[part] for row in rows]) for part in range(2))
        q, k = rotate(rms(q), cos, sin), rotate(rms(k), cos, sin)
        attended = []
        for row, q_TNH, k_TNH, v_TNH in zip(rows, q, k, v, strict=True):
            row.window.write(self.layer, row.frames, k_TNH, v_TNH)
            attended.append(attention(q_TNH, *row.window.visible(self.layer, row.frames)))
        out = torch.stack(attended)
        if self.config.gated_attn:
            gates_BTN = self.gate_proj(a_BTD[..., : self.config.n_heads]).sigmoid()
            out = out * gates_BTN.unsqueeze(-1)
        return self.out_proj(out.flatten(-2)), first_v


class CrossAttention(nn.Module):
    """Attention to a prompt. Its rows past the end are zero and, as in the original, not masked."""

    def __init__(self, config: WaypointConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        dim, width = config.d_model, config.prompt_embedding_dim
        assert width is not None
        self.q_proj = nn.Linear(dim, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, dim, bias=False)

    def kv(self, prompt_SE: torch.Tensor) -> torch.Tensor:
        """Return [2, S, N, H], a function of the prompt alone."""
        rows = rms(prompt_SE)
        k, v = (p(rows).unflatten(-1, (-1, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return torch.stack((rms(k), v))

    def forward(self, x_BTD: torch.Tensor, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        q = rms(self.q_proj(rms(x_BTD)).unflatten(-1, (-1, self.head_dim)))
        attended = [attention(q_TNH, *pair) for q_TNH, pair in zip(q, kv, strict=True)]
        out: torch.Tensor = self.out_proj(torch.stack(attended).flatten(-2))
        return out


class ControlFusion(nn.Module):
    """fc2 silu(fc1_x rms(x) + fc1_c rms(u)): the second product does not depend on x (`term`)."""

    def __init__(self, config: WaypointConfig) -> None:
        super().__init__()
        dim = config.d_model
        self.fc1_x = nn.Linear(dim, dim, bias=False)
        self.fc1_c = nn.Linear(dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)

    def term(self, embedded_D: torch.Tensor) -> torch.Tensor:
        term: torch.Tensor = self.fc1_c(rms(embedded_D))
        return term

    def forward(self, x_BTD: torch.Tensor, term_B1D: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(functional.silu(self.fc1_x(rms(x_BTD)) + term_B1D))
        return out


class Block(nn.Module):
    """control_index, prompt_index: its place among the blocks with such a module; None = it has none."""

    def __init__(self, config: WaypointConfig, layer: int) -> None:
        super().__init__()
        self.attn = SelfAttention(config, layer)
        self.mlp = MLP(config.d_model, config.mlp_dim, config.d_model)
        self.attn_bias = nn.Parameter(torch.zeros(config.d_model))
        self.mlp_bias = nn.Parameter(torch.zeros(config.d_model))
        self.control_index: int | None = None
        self.prompt_index: int | None = None
        if config.controlled(layer):
            self.control_index = sum(config.controlled(before) for before in range(layer))
            self.control = ControlFusion(config)
        if config.reads_prompt(layer):
            self.prompt_index = sum(config.reads_prompt(before) for before in range(layer))
            self.cross = CrossAttention(config)

    def forward(
        self, x: torch.Tensor, first_v: torch.Tensor | None, rows: Sequence[FrameRow], modulation_B6D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the residual stream [B, T, D], the values of the first layer)."""
        s0, b0, g0, s1, b1, g1 = modulation_B6D.unsqueeze(2).unbind(1)
        attended, first_v = self.attn(modulate(x, s0, b0), first_v, rows)
        x = x + g0 * attended
        if self.prompt_index is not None:
            x = x + self.cross(x, [self._prompt(row)[self.prompt_index] for row in rows])
        if self.control_index is not None:
            x = x + self.control(x, torch.stack([row.control[self.control_index] for row in rows]).unsqueeze(1))
        return x + g1 * self.mlp(modulate(x, s1, b1)), first_v

    @staticmethod
    def _prompt(row: FrameRow) -> torch.Tensor:
        assert row.prompt_kv is not None, "Waypoint-1 needs a prompt"
        return row.prompt_kv


class WaypointTransformer(nn.Module):
    """The whole network. Parameters are created in torch's default type and device, those of the noise MLP in fp32."""

    def __init__(self, config: WaypointConfig, *, tables: Tables = "exact", bias_in: BiasIn = "each") -> None:
        super().__init__()
        self.config, self.bias_in = config, bias_in
        dim = config.d_model
        self.rounded = tables == "served"
        self.tables = FrequencyTables.of(config, tables)
        self.denoise_step_emb = MLP(NOISE_WIDTH, 4 * dim, dim).float()
        self.ctrl_emb = MLP(config.control_values, config.mlp_dim, dim)
        self.patchify = nn.Conv2d(config.channels, dim, config.patch, config.patch, bias=False)
        self.cond_proj = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(6))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.out_norm = nn.Linear(dim, 2 * dim, bias=False)
        self.unpatchify = nn.Linear(dim, config.channels * math.prod(config.patch))
        self._modulation: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}
        self.requires_grad_(False)
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        return self.patchify.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.patchify.weight.device

    def forget(self) -> None:
        """Drop everything that was computed from weights; for when these change."""
        self._modulation.clear()

    # -- once a frame or less ------------------------------------------------------------------------------------------

    def embed_noise(self, sigma: float) -> torch.Tensor:
        """Return fp32 [D] of a noise level in [0, 1]; phases are fp32 products, as the network was trained."""
        phases = torch.tensor(1000.0 * sigma, dtype=torch.float32) * self.tables.noise
        waves = math.sqrt(2) * torch.cat((phases.sin(), phases.cos()))
        fc1, fc2 = self.denoise_step_emb.fc1.weight, self.denoise_step_emb.fc2.weight
        if self.rounded and not self.config.temporal_compression > 1:  # Waypoint-1 casts this MLP, too
            fc1, fc2 = fc1.bfloat16().float(), fc2.bfloat16().float()
        return functional.linear(functional.silu(functional.linear(waves.to(fc1.device), fc1)), fc2)

    def modulation(self, sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([layers, 6, D], [2, D]) of a noise level: of the blocks, of the head. Kept: there are few levels."""
        if sigma not in self._modulation:
            embedded = self.embed_noise(sigma)
            blocks = []
            for block in self.blocks:
                assert isinstance(block, Block)
                of_mlp = functional.silu((embedded + block.mlp_bias.float()).to(self.dtype))
                of_attention = of_mlp
                if self.bias_in == "each":
                    of_attention = functional.silu((embedded + block.attn_bias.float()).to(self.dtype))
                sources = (of_attention,) * 3 + (of_mlp,) * 3
                blocks.append(torch.stack([p(x) for p, x in zip(self.cond_proj, sources, strict=True)]))
            head = self.out_norm(functional.silu(embedded.to(self.dtype))).unflatten(0, (2, -1))
            self._modulation[sigma] = (torch.stack(blocks), head)
        return self._modulation[sigma]

    def embed_controls(self, controls: torch.Tensor) -> torch.Tensor:
        """Controls fp32 [buttons + 3] of `control_vectors` -> [D]."""
        embedded: torch.Tensor = self.ctrl_emb(controls.to(self.device, self.dtype))
        return embedded

    def controls(self, controls: torch.Tensor) -> torch.Tensor:
        """Return [control blocks, D]: what a frame's controls add in each block that reads them."""
        embedded = self.embed_controls(controls)
        return torch.stack([b.control.term(embedded) for b in self._blocks() if b.control_index is not None])

    def prompt_kv(self, prompt_SE: torch.Tensor) -> torch.Tensor:
        """Return [prompt blocks, 2, S, N, H] of an encoded prompt, whose rows past its end are zero."""
        rows = prompt_SE.to(self.device, self.dtype)
        return torch.stack([block.cross.kv(rows) for block in self._blocks() if block.prompt_index is not None])

    def rope(self, frame: int) -> Rotation:
        """Return (cos, sin) [T, C] of a latent frame, fp32: lanes of x, then y, then time. There is no last frame."""
        config = self.config
        x = (2 * torch.arange(config.width, dtype=torch.float64) + 1) / config.width - 1
        y = (2 * torch.arange(config.height, dtype=torch.float64) + 1) / config.height - 1
        size = (config.height, config.width, -1)
        time = (frame * config.time_step * self.tables.time.double()).expand(size)
        angles = torch.cat(
            (
                torch.outer(x, self.tables.xy.double()).unsqueeze(0).expand(size),
                torch.outer(y, self.tables.xy.double()).unsqueeze(1).expand(size),
                time,
            ),
            dim=-1,
        ).flatten(0, 1)
        cos, sin = angles.cos().float(), angles.sin().float()
        if self.rounded and not self.config.temporal_compression > 1:
            cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
        return cos.to(self.device), sin.to(self.device)

    # -- a forward -----------------------------------------------------------------------------------------------------

    def forward(self, rows: Sequence[FrameRow]) -> torch.Tensor:
        """Return velocities, fp32 [B, C, h, w]; writes each row's K/V into its window."""
        config = self.config
        x = self._tokens(torch.stack([row.latents for row in rows]).to(self.dtype))
        levels = [self.modulation(row.sigma) for row in rows]
        per_block = torch.stack([blocks for blocks, _ in levels], dim=1)  # [layers, B, 6, D]
        first_v: torch.Tensor | None = None
        for block, modulation in zip(self.blocks, per_block, strict=True):
            x, first_v = block(x, first_v, rows, modulation)
        scale, bias = torch.stack([head for _, head in levels]).unsqueeze(2).unbind(1)
        cells = self.unpatchify(functional.silu(modulate(x, scale, bias)))
        grid = cells.unflatten(-1, (config.channels, *config.patch)).unflatten(1, (config.height, config.width))
        channels, height, width = config.latent_shape
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(rows), channels, height, width).float()

    def _tokens(self, latents_BChw: torch.Tensor) -> torch.Tensor:
        """[B, T, D], row by row: the convolution as a product, whose bits do not depend on the batch."""
        (high, wide), weight = self.config.patch, self.patchify.weight
        cells = latents_BChw.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 1, 3, 5)
        return functional.linear(cells.flatten(3).flatten(1, 2), weight.flatten(1))

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]
