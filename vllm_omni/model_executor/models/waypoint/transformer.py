# SPDX-License-Identifier: Apache-2.0
"""Waypoint's causal world transformer: one latent frame per forward pass, predicting the velocity
of a rectified flow.

The tokens of a frame attend to each other and to the frames in every layer's ring buffer, without a
mask. The noise level and the controls are represented by one vector each. The noise level acts
through ada-RMS modulation, with six projections that all blocks share. Only the biases are specific
to each block. The controls act through a small MLP in every `ctrl_conditioning_period`-th block.
Waypoint-1 adds gates on heads, and cross-attention to a prompt. Waypoint 1.5 mixes the values of
its first layer into all other layers; pipeline stages send these values along with the residual
stream.

No step of a forward pass synchronises with the device. Values that differ between frames are device
tensors, so one CUDA graph serves all frames of a session.

The code was written from a description and recorded tensors of the original (README.md), without
using the original code.
"""

# B batch entries (one frame of one session each), T tokens of a frame, D width, N heads (of this
# rank), H head dim, C = H/2 channel pairs, S sequence length of a prompt, E its width, L layers of
# this stage

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers import fused_ops as layers_fused_ops
from vllm_omni.model_executor.layers.attention.attention import attention, stack
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, StageNetwork
from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs, Inputs
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    LinearPrecision,
    MergedLinear,
    QKVLinear,
    RowLinear,
)
from vllm_omni.model_executor.models.waypoint.config import PROMPT_ROWS, WaypointConfig
from vllm_omni.model_executor.models.waypoint.state import FrameRings, FrameSlot, Rotation

_EPS = float(torch.finfo(torch.float32).eps)
"""Epsilon of every norm, for all dtypes."""
_NOISE_WIDTH = 512


@dataclass(frozen=True)
class FrequencyTables:
    """Constant frequencies of the network, fp32 on the CPU."""

    noise: torch.Tensor
    """Frequencies of the noise embedding, [256]."""
    xy: torch.Tensor
    """Rotary frequencies of one spatial axis."""
    time: torch.Tensor
    """Rotary frequencies of the temporal axis."""

    @classmethod
    def of_config(cls, config: WaypointConfig) -> "FrequencyTables":
        # The default dtype and device are not used, because they are changed while models are
        # built.
        exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        half, spatial, temporal = _NOISE_WIDTH // 2, config.head_dim // 8, config.head_dim // 4
        noise = torch.pow(10000.0, -torch.arange(half, **exact) / (half - 1))
        fastest = config.rope_nyquist_frac / 2 * min(config.height, config.width)
        xy = math.pi * torch.linspace(1.0, fastest, -(-spatial // 2), **exact)
        time = torch.pow(config.rope_theta, -2 * torch.arange(temporal // 2, **exact) / temporal)
        return cls(
            noise.float(),
            xy.repeat_interleave(2)[:spatial].float(),
            time.repeat_interleave(2).float(),
        )


def rms(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension. The result is computed in fp32 and
    converted to the dtype of `x`.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def rms_rotate(x_BTNH: torch.Tensor, cos_BTC: torch.Tensor, sin_BTC: torch.Tensor) -> torch.Tensor:
    """Normalise each head and rotate its channel pairs (2j, 2j + 1). In the result, the first
    components of all pairs come before the second components.
    """
    first, second = rms(x_BTNH).float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_BTC.unsqueeze(-2), sin_BTC.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(
        x_BTNH.dtype
    )


def modulate(x_BTD: torch.Tensor, scale_B1D: torch.Tensor, bias_B1D: torch.Tensor) -> torch.Tensor:
    return rms(x_BTD) * (1 + scale_B1D) + bias_B1D


def gated_add(
    x_BTD: torch.Tensor, update_BTD: torch.Tensor, gate_B1D: torch.Tensor
) -> torch.Tensor:
    return x_BTD + gate_B1D * update_BTD


def mix(v: torch.Tensor, first_v: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return v + share * (first_v - v)


def silu_sum(x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    return functional.silu(x + term)


@dataclass(frozen=True)
class FusedOps(layers_fused_ops.FusedOps):
    """The fused pointwise ops of Waypoint's network, which are the functions above."""

    rms: Callable[..., torch.Tensor] = rms
    rms_rotate: Callable[..., torch.Tensor] = rms_rotate
    modulate: Callable[..., torch.Tensor] = modulate
    gated_add: Callable[..., torch.Tensor] = gated_add
    mix: Callable[..., torch.Tensor] = mix
    silu_sum: Callable[..., torch.Tensor] = silu_sum


# -- inputs of a forward pass ----------------------------------------------------------------------


@dataclass(frozen=True)
class FrameItem:
    """One batch entry of a forward pass, with tensors on the model's device."""

    latents: torch.Tensor
    """Input latents, fp32 [C, h, w]."""
    sigma: float
    """Noise level. 0 in the clean-context pass."""
    rope: Rotation
    """Rotary tables of the frame: the result of `WaypointTransformer.rope`."""
    control: torch.Tensor
    """Terms of the frame's controls: the result of `WaypointTransformer.controls`."""
    window: FrameRings
    """Ring buffers of the session. Every block writes to them at `slot`."""
    slot: FrameSlot
    """Slot that the frame's K/V are written to."""
    prompt_kv: torch.Tensor | None = None
    """Result of `cross_attention_kv`, or None if the model takes no prompts."""


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of the layers in one forward pass."""

    items: Sequence[FrameItem]
    """Batch entries of the forward pass."""
    cos: torch.Tensor
    """Cosines of the rotary tables, fp32 [B, T, C]."""
    sin: torch.Tensor
    """Sines of the rotary tables, fp32 [B, T, C]."""
    controls: Iterator[torch.Tensor]
    """Terms of the controls, [B, 1, D], for each block with a `ControlFusion`, in order."""
    prompts: Iterator[Sequence[torch.Tensor]]
    """Prompt K/V [2, S, N, H] of each batch entry, for each block with a `CrossAttention`, in
    order."""

    def attend(
        self, layer: int, q_BTNH: torch.Tensor, k_BTNH: torch.Tensor, v_BTNH: torch.Tensor
    ) -> torch.Tensor:
        items = zip(self.items, q_BTNH, k_BTNH, v_BTNH, strict=True)
        return stack([item.window.attend(layer, q, k, v, item.slot) for item, q, k, v in items])


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerBuilder:
    """Constructor arguments that all layers of this rank share."""

    config: WaypointConfig
    """Architecture of the network."""
    parallel: ParallelContext
    """Parallel layout of this rank."""
    fused_ops: FusedOps
    """Pointwise ops, compiled or eager."""
    precision: LinearPrecision
    """Precision of the linear layers."""
    prefix: str
    """Name of the layer in the pipeline. The quantization config refers to layers by this name."""

    def under(self, name: str) -> "LayerBuilder":
        return replace(self, prefix=f"{self.prefix}.{name}")

    def column(self, inputs: int, outputs: int, name: str) -> ColumnLinear:
        return ColumnLinear(
            inputs, outputs, self.parallel, self.precision, f"{self.prefix}.{name}", bias=False
        )

    def item(self, inputs: int, outputs: int, name: str) -> RowLinear:
        return RowLinear(
            inputs, outputs, self.parallel, self.precision, f"{self.prefix}.{name}", bias=False
        )


def mlp(fc1: nn.Module, fc2: nn.Module) -> nn.Sequential:
    """Return two linear layers with SiLU between them."""
    return nn.Sequential(OrderedDict(fc1=fc1, act=nn.SiLU(), fc2=fc2))


def whole_mlp(width: int, hidden: int, out: int) -> nn.Sequential:
    """Return an MLP. It is replicated on all ranks, because it runs at most once per frame."""
    return mlp(nn.Linear(width, hidden, bias=False), nn.Linear(hidden, out, bias=False))


class SelfAttention(nn.Module):
    """Grouped-query attention of a frame over its ring buffer. `layer` is the index of the layer in
    the whole network.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, parallel = build.config, build.parallel
        self.config, self.fused_ops, self.layer = config, build.fused_ops, layer
        heads, dim = config.n_heads, config.d_model
        qkv = (
            dim,
            config.head_dim,
            heads,
            config.n_kv_heads,
            parallel,
            build.precision,
            f"{build.prefix}.qkv",
        )
        self.qkv = QKVLinear(*qkv, bias=False)
        self.out_proj = build.item(dim, dim, "out_proj")
        own, kv = heads // parallel.tensor_size, config.n_kv_heads // parallel.tensor_size
        self.sizes = [count * config.head_dim for count in (own, kv, kv)]
        if config.value_residual:
            self.v_lamb = nn.Parameter(torch.zeros(()), requires_grad=False)
        if config.gated_attn:
            self.gate_proj = build.column(heads, heads, "gate_proj")

    def forward(
        self, a_BTD: torch.Tensor, first_v: torch.Tensor | None, inputs: ForwardInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention output and the values of the first layer. `first_v` contains these
        values; it is None in the first layer itself.
        """
        q, k, v = (
            part.unflatten(-1, (-1, self.config.head_dim))
            for part in self.qkv(a_BTD).split(self.sizes, dim=-1)
        )
        if first_v is None:
            first_v = v
        elif self.config.value_residual:
            v = self.fused_ops.mix(v, first_v, self.v_lamb)
        q, k = (self.fused_ops.rms_rotate(x, inputs.cos, inputs.sin) for x in (q, k))
        out = inputs.attend(self.layer, q, k, v)
        if self.config.gated_attn:
            gates_BTN = self.gate_proj(a_BTD[..., : self.config.n_heads].contiguous()).sigmoid()
            out = out * gates_BTN.unsqueeze(-1)
        return self.out_proj(out.flatten(-2)), first_v


class CrossAttention(nn.Module):
    """Cross-attention to a prompt. The padding of the prompt is zero and is not masked, as in the
    original.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        self.fused_ops, self.head_dim = build.fused_ops, build.config.head_dim
        dim, width = build.config.d_model, build.config.prompt_embedding_dim
        assert width is not None
        self.q = build.column(dim, width, "q")
        rest = (build.parallel, build.precision, f"{build.prefix}.kv")
        self.kv = MergedLinear(width, ("k", "v"), (width, width), *rest, bias=False)
        self.out_proj = build.item(width, dim, "out_proj")

    def keys_values(self, prompt_SE: torch.Tensor) -> torch.Tensor:
        """Return the K/V of a prompt, [2, S, N, H]. The K/V depend only on the prompt."""
        k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in self.kv(rms(prompt_SE)).chunk(2, dim=-1)
        )
        return torch.stack((rms(k), v))

    def forward(self, x_BTD: torch.Tensor, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        rms = self.fused_ops.rms
        q = rms(self.q(rms(x_BTD)).unflatten(-1, (-1, self.head_dim)))
        attended = [attention(q_TNH, *pair) for q_TNH, pair in zip(q, kv, strict=True)]
        out: torch.Tensor = self.out_proj(stack(attended).flatten(-2))
        return out


class ControlFusion(nn.Module):
    """fc2 silu(fc1_x rms(x) + fc1_c rms(u)). The second product (`term`) does not depend on x."""

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        self.fused_ops, dim = build.fused_ops, build.config.d_model
        self.fc1_x, self.fc1_c = build.column(dim, dim, "fc1_x"), build.column(dim, dim, "fc1_c")
        self.fc2 = build.item(dim, dim, "fc2")

    def term(self, embedded_D: torch.Tensor) -> torch.Tensor:
        term: torch.Tensor = self.fc1_c(rms(embedded_D).unsqueeze(0))[0]
        return term

    def forward(self, x_BTD: torch.Tensor, term_B1D: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(
            self.fused_ops.silu_sum(self.fc1_x(self.fused_ops.rms(x_BTD)), term_B1D)
        )
        return out


class WaypointBlock(nn.Module):
    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, self.fused_ops = build.config, build.fused_ops
        dim, hidden, inner = config.d_model, config.mlp_dim, build.under("mlp")
        self.attn = SelfAttention(build.under("attn"), layer)
        self.mlp = mlp(inner.column(dim, hidden, "fc1"), inner.item(hidden, dim, "fc2"))
        self.attn_bias = nn.Parameter(torch.zeros(dim), requires_grad=False)
        self.mlp_bias = nn.Parameter(torch.zeros(dim), requires_grad=False)
        self.control = ControlFusion(build.under("control")) if config.controlled(layer) else None
        self.cross = CrossAttention(build.under("cross")) if config.reads_prompt(layer) else None

    def forward(
        self,
        x: torch.Tensor,
        first_v: torch.Tensor | None,
        inputs: ForwardInputs,
        modulation_B6D: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream, [B, T, D], and the values of the first layer."""
        fused_ops = self.fused_ops
        s0, b0, g0, s1, b1, g1 = modulation_B6D.unsqueeze(2).unbind(1)
        attended, first_v = self.attn(fused_ops.modulate(x, s0, b0), first_v, inputs)
        x = fused_ops.gated_add(x, attended, g0)
        if self.cross is not None:
            x = x + self.cross(x, next(inputs.prompts))
        if self.control is not None:
            x = x + self.control(x, next(inputs.controls))
        return fused_ops.gated_add(x, self.mlp(fused_ops.modulate(x, s1, b1)), g1), first_v


class WaypointTransformer(StageNetwork):
    """This rank's part of the network.

    Parameters have torch's default dtype and device. The parameters of the noise MLP are always
    fp32.

    Args:
        config: Architecture of the network.
        parallel: Parallel layout of this rank, or None if there is only one rank.
        compiled: Whether to compile pointwise ops.
        cuda_graphs: Whether to replay forward passes as CUDA graphs (`ForwardGraphs`).
        quantization: Quantization of the linear layers.
        prefix: Name of the network in the pipeline. The quantization config refers to layers by
            names that start with this name.
    """

    def __init__(
        self,
        config: WaypointConfig,
        parallel: ParallelContext | None = None,
        *,
        compiled: bool = False,
        cuda_graphs: bool = False,
        quantization: QuantizationConfig | None = None,
        prefix: str = "transformer",
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel or ParallelContext()
        dim = config.d_model
        self.tables = FrequencyTables.of_config(config)
        self.graphs = ForwardGraphs() if cuda_graphs else None
        # `gate_proj` has few channels, and the input of `fc1_c` is a single token.
        retained = [f"{prefix}.blocks.*.attn.gate_proj", f"{prefix}.blocks.*.control.fc1_c"]
        self._build = LayerBuilder(
            config,
            self.parallel,
            FusedOps.build(compiled),
            LinearPrecision(quantization, retained),
            f"{prefix}.blocks",
        )
        self.denoise_step_emb = whole_mlp(_NOISE_WIDTH, 4 * dim, dim).float()
        self.ctrl_emb = whole_mlp(config.control_values, config.mlp_dim, dim)
        self.patchify = nn.Conv2d(config.channels, dim, config.patch, config.patch, bias=False)
        self.cond_proj = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(6))
        self.blocks = nn.ModuleDict(
            {str(layer): self.empty_block(layer) for layer in self.layer_range}
        )
        self.out_norm = nn.Linear(dim, 2 * dim, bias=False)
        self.unpatchify = nn.Linear(dim, config.channels * math.prod(config.patch))
        self._modulation: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}
        self.requires_grad_(False)
        self.eval()

    def empty_block(self, layer: int) -> WaypointBlock:
        return WaypointBlock(self._build.under(str(layer)), layer)

    @property
    def layers(self) -> list[WaypointBlock]:
        """The blocks of this stage, in order."""
        return [block for block in self.blocks.values() if isinstance(block, WaypointBlock)]

    @property
    def layer_range(self) -> range:
        return self.parallel.layers(self.config.n_layers)

    @property
    def typed_weight(self) -> torch.Tensor:
        return self.patchify.weight

    @property
    def num_cache_heads(self) -> int:
        """Number of heads in this rank's K/V cache."""
        return self.config.n_kv_heads // self.parallel.tensor_size

    @property
    def cross_kv_nbytes(self) -> int:
        """Size in bytes of the `cross_attention_kv` of one prompt."""
        width = (self.config.prompt_embedding_dim or 0) // self.parallel.tensor_size
        return (
            sum(block.cross is not None for block in self.layers)
            * 2
            * PROMPT_ROWS
            * width
            * self.dtype.itemsize
        )

    def clear_derived(self) -> None:
        super().clear_derived()
        self._modulation.clear()

    # -- at most once per frame --------------------------------------------------------------------

    def embed_noise(self, sigma: float) -> torch.Tensor:
        """Return the embedding of a noise level in [0, 1], fp32 [D]. Phases are fp32 products, as
        in training.
        """
        phases = torch.tensor(1000.0 * sigma, dtype=torch.float32) * self.tables.noise
        waves = math.sqrt(2) * torch.cat((phases.sin(), phases.cos()))
        embedded: torch.Tensor = self.denoise_step_emb(waves.to(self.device))
        return embedded

    def modulation(self, sigma: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the modulation for a noise level: [L, 6, D] for the blocks and [2, D] for the
        head. The result is cached, because there are few noise levels.
        """
        if sigma not in self._modulation:
            embedded = self.embed_noise(sigma)
            blocks = []
            for block in self.layers:
                halves = [
                    (embedded + bias.float()).to(self.dtype)
                    for bias in (block.attn_bias, block.mlp_bias)
                ]
                sources = [functional.silu(half) for half in halves for _ in range(3)]
                blocks.append(
                    torch.stack([p(x) for p, x in zip(self.cond_proj, sources, strict=True)])
                )
            head = self.out_norm(functional.silu(embedded.to(self.dtype))).unflatten(0, (2, -1))
            self._modulation[sigma] = (torch.stack(blocks), head)
        return self._modulation[sigma]

    def embed_controls(self, controls: torch.Tensor) -> torch.Tensor:
        """Return the embedding [D] of `controls`, one vector from `control_vectors`, fp32 [buttons
        + 3].
        """
        embedded: torch.Tensor = self.ctrl_emb(to_device(controls.to(self.dtype), self.device))
        return embedded

    def controls(self, controls: torch.Tensor) -> torch.Tensor:
        """Return the terms that a frame's controls add, [control blocks, D], for the channels of
        this rank.
        """
        embedded = self.embed_controls(controls)
        terms = [block.control.term(embedded) for block in self.layers if block.control is not None]
        return torch.stack(terms) if terms else embedded.new_empty(0, embedded.shape[0])

    def cross_attention_kv(self, prompt_SE: torch.Tensor) -> torch.Tensor:
        """Return the K/V of text embeddings, [prompt blocks, 2, S, N, H]. The padding of the
        embeddings is zero and takes part in attention.
        """
        items = prompt_SE.to(self.device, self.dtype)
        retained = [
            block.cross.keys_values(items) for block in self.layers if block.cross is not None
        ]
        return torch.stack(retained) if retained else items.new_empty(0)

    def rope(self, frame: int) -> Rotation:
        """Return the rotary tables (cos, sin) of a latent frame, fp32 [T, C], with the channels in
        the order x, y, time. Frame indices are not limited.
        """
        time = frame * self.config.time_step * self.tables.time.double()
        cos, sin = (
            torch.cat((spatial, lanes.float().expand(len(spatial), -1)), dim=-1)
            for spatial, lanes in zip(self._spatial, (time.cos(), time.sin()), strict=True)
        )
        return to_device(cos, self.device), to_device(sin, self.device)

    @cached_property
    def _spatial(self) -> Rotation:
        """Return the rotary tables (cos, sin) for the x and y channels, on the CPU."""
        config, lanes = self.config, self.tables.xy.double()
        x = (2 * torch.arange(config.width, dtype=torch.float64) + 1) / config.width - 1
        y = (2 * torch.arange(config.height, dtype=torch.float64) + 1) / config.height - 1
        size = (config.height, config.width, -1)
        of_x, of_y = (
            torch.outer(x, lanes).unsqueeze(0).expand(size),
            torch.outer(y, lanes).unsqueeze(1).expand(size),
        )
        angles = torch.cat((of_x, of_y), dim=-1).flatten(0, 1)
        return angles.cos().float(), angles.sin().float()

    # -- forward pass ------------------------------------------------------------------------------

    def forward(
        self, items: Sequence[FrameItem], hidden_BTD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Predict velocities, fp32 [B, C, h, w], and write each frame's K/V into its window.

        With tensor parallelism, this is a collective operation. `hidden_BTD` is the result of the
        previous pipeline stage. All stages except the last return hidden states instead of
        velocities.
        """
        levels = [self.modulation(item.sigma) for item in items]
        inputs: Inputs = {
            "blocks": stack([blocks for blocks, _ in levels]),
            "head": stack([head for _, head in levels]),
            "latents": stack([item.latents for item in items]),
            "cos": stack([item.rope[0] for item in items]),
            "sin": stack([item.rope[1] for item in items]),
            "control": stack([item.control for item in items]),
            "tokens": stack([item.slot.tokens_KT for item in items]),
            "key_ranges": stack([item.slot.key_ranges_K2 for item in items]),
        }
        if hidden_BTD is not None:
            inputs["hidden"] = hidden_BTD
        prompts = {
            f"prompt{n}": item.prompt_kv
            for n, item in enumerate(items)
            if item.prompt_kv is not None
        }
        if self.graphs is None:
            return self._predict(items, inputs | prompts)
        # The windows are copied, because a window drops its memory when it is closed.
        held = [replace(item, window=copy.copy(item.window)) for item in items]
        sets_scales = tuple(item.slot.sets_scales for item in items)
        return self.graphs(
            sets_scales,
            inputs | prompts,
            lambda own: self._predict(held, own),
            buffers=[position for item in items for position in item.window.buffers],
            kind=sets_scales,
            steady=prompts.keys(),
        )

    def _predict(self, items: Sequence[FrameItem], given: Inputs) -> torch.Tensor:
        """Compute `forward`. `given` contains the inputs that differ between calls. From `items`,
        this method reads only values that a CUDA graph may retain.
        """
        placed = zip(items, given["tokens"], given["key_ranges"], strict=True)
        prompts = zip(
            *(given[f"prompt{n}"] for n, item in enumerate(items) if item.prompt_kv is not None),
            strict=True,
        )
        inputs = ForwardInputs(
            [
                replace(item, slot=FrameSlot(tokens, keys, item.slot.sets_scales))
                for item, tokens, keys in placed
            ],
            given["cos"],
            given["sin"],
            iter(given["control"].unsqueeze(2).unbind(1)),
            prompts,
        )
        first_v: torch.Tensor | None = None
        if self.parallel.first_stage:
            x = self._tokens(given["latents"].to(self.dtype))
        else:
            x, values = given["hidden"].tensor_split((self.config.d_model,), dim=2)
            own = values.chunk(self.parallel.tensor_size, dim=2)[self.parallel.tensor_rank]
            first_v = own.unflatten(-1, (-1, self.config.head_dim))
        for block, modulation in zip(self.layers, given["blocks"].unbind(1), strict=True):
            x, first_v = block(x, first_v, inputs, modulation)
        if not self.parallel.last_stage:
            assert first_v is not None
            return torch.cat((x, self.parallel.all_gather_channels(first_v.flatten(2))), dim=-1)
        scale, bias = given["head"].unsqueeze(2).unbind(1)
        return self._velocity(functional.silu(self._build.fused_ops.modulate(x, scale, bias)))

    def _tokens(self, latents_BChw: torch.Tensor) -> torch.Tensor:
        """Return tokens [B, T, D], row by row. The patch convolution is computed as a matrix
        product, so that results are bitwise independent of the batch.
        """
        (high, wide), weight = self.config.patch, self.patchify.weight
        cells = (
            latents_BChw.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 1, 3, 5)
        )
        return functional.linear(cells.flatten(3).flatten(1, 2), weight.flatten(1))

    def _velocity(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Convert tokens to the velocity, fp32 [B, C, h, w]."""
        config, cells = self.config, self.unpatchify(x_BTD)
        grid = cells.unflatten(-1, (config.channels, *config.patch)).unflatten(
            1, (config.height, config.width)
        )
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(x_BTD), *config.latent_shape).float()
