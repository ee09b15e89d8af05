# SPDX-License-Identifier: Apache-2.0
"""Matrix-Game 2.0's causal diffusion transformer: the Wan transformer with action modules in some
blocks and cross-attention to image embeddings.

An action module runs between cross-attention and the FFN. In the mouse branch, each token is
combined with the mouse values of its frame and attends over time to tokens at the same position. In
the keyboard branch, every token attends over time to K/V computed from key states. Each branch's
K/V window is as long as the self-attention window. Keyboard K/V depend only on the chunk's actions
and are written once per chunk (`write_keyboard`).

Maths: SkyworkAI/Matrix-Game @ 6146d7a, Matrix-Game-2, wan/modules/action_module.py and
causal_model.py.
"""

# B batch entries (one chunk of one session each), T tokens of a chunk on this rank, F frames, S
# tokens of a frame, W visible frames, D width, N action heads (of this rank if sharded), H head
# dim, C rotated channel pairs, R video frames that condition a latent frame

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.attention.attention import stack
from vllm_omni.model_executor.layers.attention.rope import apply_rope, axis_tables
from vllm_omni.model_executor.layers.collectives.head_all_to_all import (
    heads_to_tokens,
    tokens_to_heads,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    LinearPrecision,
    RowLinear,
    StackedLinear,
)
from vllm_omni.model_executor.layers.linear.quantized_input import Input, takes_quantized
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig
from vllm_omni.model_executor.models.matrix_game.state import ActionWindows
from vllm_omni.model_executor.models.wan.transformer.chunk_transformer import (
    ImageItem,
    ImageTransformer,
)
from vllm_omni.model_executor.models.wan.transformer.fused_ops import FusedOps
from vllm_omni.model_executor.models.wan.transformer.layers import ImageProjection
from vllm_omni.model_executor.models.wan.transformer.transformer import WanBlock

Rotation = tuple[torch.Tensor, torch.Tensor]


def head_rms_rope(
    x: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS-normalise each head of `x` [..., T, N, H] without a weight, and rotate its first 2 C
    channels.

    The result has the dtype of `x`.
    """
    heads = x.float()
    heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    lanes = 2 * cos_TC.shape[-1]
    return torch.cat(
        (apply_rope(heads[..., :lanes], cos_TC, sin_TC), heads[..., lanes:]), dim=-1
    ).to(x.dtype)


def attention_over_time(
    q_FSNH: torch.Tensor, k_WSNH: torch.Tensor, v_WSNH: torch.Tensor
) -> torch.Tensor:
    """Compute each token position's attention over the visible frames. No kernel for long sequences
    is used, because there are only a few keys.
    """
    q, k, v = q_FSNH.float().unsqueeze(1), k_WSNH.float(), v_WSNH.float()
    weights_FWSN = ((q * k).sum(-1) / math.sqrt(q.shape[-1])).softmax(dim=1)
    return (weights_FWSN.unsqueeze(-1) * v).sum(1).to(q_FSNH.dtype)


@dataclass(frozen=True)
class MatrixGameFusedOps(FusedOps):
    """The pointwise ops of the Wan transformer and of the action modules."""

    head_rms_rope: Callable[..., torch.Tensor] = head_rms_rope
    attention_over_time: Callable[..., torch.Tensor] = attention_over_time


@dataclass(frozen=True, kw_only=True)
class ActionItem(ImageItem):
    """A batch entry with actions."""

    mouse: torch.Tensor | None
    """Mouse values per token, [T, R * values], in the model's dtype. None: the model has no mouse
    input.
    """
    action_cos: torch.Tensor
    """Cosines of the action heads' rotations for all F S tokens, fp32 [F S, C]."""
    action_sin: torch.Tensor
    """Sines of the rotations, with the shape of `action_cos`."""
    window: ActionWindows
    """The session's K/V windows. The keyboard window already contains the chunk's frames."""


class ActionModule(nn.Module):
    """The mouse and keyboard branches of a block. The parameters of both branches have the same
    names as in the original. As in the original, the norms' gains are not used.
    """

    def __init__(
        self,
        config: MatrixGameConfig,
        parallel: ParallelContext,
        fused_ops: MatrixGameFusedOps,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__()
        self.config, self.parallel, self.fused_ops = config, parallel, fused_ops
        dim, width, embed = config.dim, config.keyboard_width, config.keyboard_embed
        common = (parallel, quant_config)
        self.keyboard_embed = nn.Sequential(
            nn.Linear(config.keyboard_dim, embed), nn.SiLU(), nn.Linear(embed, embed)
        )
        self.mouse_attn_q = ColumnLinear(dim, width, *common, f"{prefix}.mouse_attn_q", bias=False)
        self.keyboard_attn_kv = StackedLinear(
            config.action_frames * embed,
            (width, width),
            *common,
            f"{prefix}.keyboard_attn_kv",
            bias=False,
        )
        self.proj_keyboard = RowLinear(width, dim, *common, f"{prefix}.proj_keyboard", bias=False)
        if config.mouse_dim:
            width, items = config.mouse_width, config.action_frames * config.mouse_dim
            self.mouse_mlp = nn.Sequential(
                ColumnLinear(dim + items, width, *common, f"{prefix}.mouse_mlp.0"),
                nn.GELU(approximate="tanh"),
                RowLinear(width, width, *common, f"{prefix}.mouse_mlp.2"),
                nn.LayerNorm(width, eps=1e-5),
            )
            self.t_qkv = StackedLinear(width, (width,) * 3, *common, f"{prefix}.t_qkv", bias=False)
            self.proj_mouse = RowLinear(width, dim, *common, f"{prefix}.proj_mouse", bias=False)

    def forward(self, x_BTD: torch.Tensor, items: Sequence[ActionItem], index: int) -> torch.Tensor:
        """Return the residual stream after the updates of both branches. `index` is the module's
        index within its stage.
        """
        first = self.keyboard_embed[0]
        assert isinstance(first, nn.Linear)
        dtype = first.weight.dtype  # the model's dtype, because this layer is never quantized
        if self.config.mouse_dim:
            x_BTD = (x_BTD + self.mouse(x_BTD.to(dtype), items, index)).to(x_BTD.dtype)
        return (x_BTD + self.keyboard(x_BTD.to(dtype), items, index)).to(x_BTD.dtype)

    def keyboard_kv(
        self, keyboard_FRK: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each latent frame's K and V [F, N, H], computed from the key states of its video
        frames.

        `rotation` is (cos, sin) [F, C].
        """
        embedded = self.keyboard_embed(keyboard_FRK).flatten(1)
        k, v = self._heads(self.keyboard_attn_kv(embedded), 2, self.config.keyboard_width)
        return self.fused_ops.head_rms_rope(k, *rotation, self.config.eps), v

    def mouse(self, x_BTD: torch.Tensor, items: Sequence[ActionItem], index: int) -> torch.Tensor:
        """Return the mouse branch's update, and write its K/V."""
        mouse = stack([item.mouse for item in items if item.mouse is not None])
        qkv = self.t_qkv(self.mouse_mlp(torch.cat((x_BTD, mouse), dim=-1)))
        q, k, v = self._heads(qkv, 3, self.config.mouse_width)
        if self.parallel.sequence_parallel:
            tokens = len(items[0].action_cos)
            q, k, v = tokens_to_heads(self.parallel, (q, k, v), tokens)
        attended = []
        for item, q_TNH, k_TNH, v_TNH in zip(items, q, k, v, strict=True):
            window, buffers = item.window["mouse"], item.window.tokens_per_frame
            turn = (item.action_cos, item.action_sin, self.config.eps)
            window.write(index, item.frames, self.fused_ops.head_rms_rope(k_TNH, *turn), v_TNH)
            q_TNH = self.fused_ops.head_rms_rope(q_TNH, *turn)
            q_FSNH, k_WSNH, v_WSNH = (
                x.unflatten(0, (-1, buffers)) for x in (q_TNH, *window.visible(index, item.frames))
            )
            attended.append(
                self.fused_ops.attention_over_time(q_FSNH, k_WSNH, v_WSNH).flatten(0, 1)
            )
        return self.proj_mouse(heads_to_tokens(self.parallel, stack(attended)).flatten(-2))

    def keyboard(
        self, x_BTD: torch.Tensor, items: Sequence[ActionItem], index: int
    ) -> torch.Tensor:
        """Return the keyboard branch's update. Its K/V must already have been written."""
        (q,) = self._heads(self.mouse_attn_q(x_BTD), 1, self.config.keyboard_width)
        attended = []
        for item, q_TNH in zip(items, q, strict=True):
            window, own = item.window["keyboard"], self.parallel.token_slice(len(item.action_cos))
            q_TNH = self.fused_ops.head_rms_rope(
                q_TNH, item.action_cos[own], item.action_sin[own], self.config.eps
            )
            attended.append(window.attend(index, item.frames, q_TNH))
        return self.proj_keyboard(stack(attended).flatten(-2))

    def _heads(self, x: torch.Tensor, parts: int, width: int) -> Sequence[torch.Tensor]:
        return [
            part.unflatten(-1, (-1, width // self.config.action_heads))
            for part in x.chunk(parts, dim=-1)
        ]


class ActionBlock(WanBlock):
    """A block with an action module. `action_index` is the module's index within its stage."""

    fused_ops: MatrixGameFusedOps
    action_index = 0

    def __init__(
        self,
        config: MatrixGameConfig,
        parallel: ParallelContext,
        fused_ops: MatrixGameFusedOps,
        index: int,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__(config, parallel, fused_ops, index, quant_config, prefix)
        self.action_model = ActionModule(
            config, parallel, fused_ops, quant_config, f"{prefix}.action_model"
        )

    def after_cross_attention(
        self,
        x_BTD: torch.Tensor,
        attended_BTD: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        items: Sequence[ActionItem],
    ) -> tuple[torch.Tensor, Input]:
        x = self.action_model((x_BTD + attended_BTD).to(x_BTD.dtype), items, self.action_index)
        dtype, quantized = self.norm3.weight.dtype, takes_quantized(self.ffn[0])
        return x, self.fused_ops.modulated_norm(x, shift, scale, self.eps, dtype, quantized)


class MatrixGameTransformer(ImageTransformer[MatrixGameConfig]):
    """This rank's part of the network. The parameters of a new instance are uninitialised and use
    torch's default dtype and device.
    """

    fused_ops_type = MatrixGameFusedOps
    moving_fields = (*ImageTransformer.moving_fields, "mouse", "action_cos", "action_sin")
    high_precision = ("blocks.*.action_model.mouse_mlp.0", "blocks.*.action_model.keyboard_attn_kv")
    """Layers that are not quantized. FP8 matrix products do not support the input width of the
    first layer. The second layer runs only once per chunk, on few tokens.
    """

    def _add_layers(self) -> None:
        self.parallel.check_divisible(self.config.action_heads, "action_config.heads_num")
        self._number_actions()

    def _add_context_layers(self) -> None:
        self.img_emb = ImageProjection(self.config)

    def embed_context(self, text_SE: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.img_emb(text_SE)
        return embedded

    def _block_type(self, layer: int) -> type[WanBlock]:
        return ActionBlock if layer in self.config.action_blocks else WanBlock

    def _number_actions(self) -> None:
        for index, block in enumerate(self.action_blocks()):
            block.action_index = index

    def action_blocks(self) -> list[ActionBlock]:
        """Return this stage's blocks that have an action module."""
        return [block for block in self._blocks() if isinstance(block, ActionBlock)]

    def move_layers(self, move: LayerMove) -> None:
        super().move_layers(move)
        self._number_actions()

    def actions(
        self, mouse_FRM: torch.Tensor | None, frames: range, buffers: int
    ) -> dict[str, Any]:
        """Return the fields of `ActionItem` that depend on a chunk's actions."""
        cos, sin = (
            to_device(x.repeat_interleave(buffers, 0), self.device) for x in self._rotation(frames)
        )
        mouse = None
        if mouse_FRM is not None:
            per_token = mouse_FRM.flatten(1).to(self.dtype).repeat_interleave(buffers, 0)
            mouse = to_device(per_token[self.parallel.token_slice(len(per_token))], self.device)
        return {"mouse": mouse, "action_cos": cos, "action_sin": sin}

    def write_keyboard(
        self, window: ActionWindows, frames: range, keyboard_FRK: torch.Tensor
    ) -> None:
        """Write a chunk's keyboard K/V for every block of this stage that has an action module.
        Call this before the chunk's first forward pass.

        `keyboard_FRK` is fp32 on the CPU. The call uses no collectives.
        """
        items = to_device(keyboard_FRK.to(self.dtype), self.device)
        cos, sin = (to_device(x, self.device) for x in self._rotation(frames))
        for block in self.action_blocks():
            k_FNH, v_FNH = block.action_model.keyboard_kv(items, (cos, sin))
            window["keyboard"].write(block.action_index, frames, k_FNH, v_FNH)

    def _rotation(self, frames: range) -> Rotation:
        """Return the rotations (cos, sin) [F, C] of the action heads, fp32 on the CPU."""
        return axis_tables(frames, self.config.action_rope_dim, self.config.action_rope_theta)
