# SPDX-License-Identifier: Apache-2.0
"""DreamX-World's causal diffusion transformer: the Wan 2.2 5B transformer with a camera branch.

The camera branch (PRoPE) runs in parallel with self-attention and has the same input and the same
gate. The branch's queries, keys and values are multiplied by their frame's camera projection, in
groups of four channels. The branch attends only to the current chunk's tokens, so it needs no
cache.

Maths: AMAP-ML/DreamX-World @ a1f4c6e, the network used by the autoregressive script.
"""

# B batch entries (one chunk of one session each), T tokens of a chunk on this rank, F frames, D
# width of the camera branch on this rank, N heads (of this rank if sharded), H head dim

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.attention.attention import attention, stack
from vllm_omni.model_executor.layers.collectives.head_all_to_all import (
    heads_to_tokens,
    tokens_to_heads,
)
from vllm_omni.model_executor.layers.collectives.parallel import ChannelWeight, ParallelContext
from vllm_omni.model_executor.layers.kv_cache.window import WindowAttention
from vllm_omni.model_executor.layers.linear.linear import LinearPrecision, MergedLinear, RowLinear
from vllm_omni.model_executor.layers.linear.quantized_input import Input, takes_quantized
from vllm_omni.model_executor.models.dreamx_world.config import GROUP, DreamXConfig
from vllm_omni.model_executor.models.wan.transformer.chunk_transformer import (
    ChunkItem,
    ChunkTransformer,
)
from vllm_omni.model_executor.models.wan.transformer.fused_ops import FusedOps, rms_scale
from vllm_omni.model_executor.models.wan.transformer.layers import squares_of_all_ranks
from vllm_omni.model_executor.models.wan.transformer.transformer import WanBlock


def project(x_BTD: torch.Tensor, matrices_BT44: torch.Tensor) -> torch.Tensor:
    """Multiply each group of four channels by its token's matrix, in fp32. The result has the dtype
    of `x_BTD`.
    """
    groups = x_BTD.float().unflatten(-1, (-1, GROUP)).unbind(-1)
    rows = matrices_BT44.unsqueeze(-3).unbind(-2)  # [B, T, 1, 4] each
    products = []
    for row in rows:
        a, b, c, d = (group * row[..., column] for column, group in enumerate(groups))
        products.append(a + b + c + d)
    return torch.stack(products, dim=-1).flatten(-2).to(x_BTD.dtype)


def rms_project(
    x_BTD: torch.Tensor,
    squares: torch.Tensor | None,
    weight: torch.Tensor,
    matrices_BT44: torch.Tensor,
    dim: int,
    eps: float,
) -> torch.Tensor:
    """Apply `rms_scale`, then `project`, in fp32. The result has the dtype of `x_BTD`."""
    return project(rms_scale(x_BTD.float(), squares, weight, dim, eps), matrices_BT44).to(
        x_BTD.dtype
    )


@dataclass(frozen=True)
class DreamXFusedOps(FusedOps):
    """The pointwise ops of the Wan transformer and of the camera branch."""

    project: Callable[..., torch.Tensor] = project
    rms_project: Callable[..., torch.Tensor] = rms_project


@dataclass(frozen=True, kw_only=True)
class PosedItem(ChunkItem):
    """A batch entry with camera matrices."""

    camera: torch.Tensor
    """The projection P and its inverse for each token on this rank, fp32 [2, T, 4, 4]."""


class CameraAttention(nn.Module):
    """The camera branch of a block. Its parameters have the same names as in the original."""

    def __init__(
        self,
        config: DreamXConfig,
        parallel: ParallelContext,
        fused_ops: DreamXFusedOps,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__()
        self.parallel, self.fused_ops = parallel, fused_ops
        self.dim, self.eps = config.camera_dim, config.eps
        self.head_dim = self.dim // config.num_heads
        self.qkv_proj = MergedLinear(
            config.dim,
            ("q_proj", "k_proj", "v_proj"),
            (self.dim,) * 3,
            parallel,
            quant_config,
            f"{prefix}.qkv_proj",
        )
        self.norm_q = ChannelWeight(self.dim, parallel)
        self.norm_k = ChannelWeight(self.dim, parallel)
        self.out_proj = RowLinear(
            self.dim, config.dim, parallel, quant_config, f"{prefix}.out_proj"
        )

    def forward(self, x_BTD: Input, items: Sequence[PosedItem], num_tokens: int) -> torch.Tensor:
        """Return the update to the residual stream, before the gate is applied.

        Args:
            x_BTD: Input to self-attention.
            items: Batch entries.
            num_tokens: Number of tokens in a chunk, across all ranks.
        """
        ops, camera = self.fused_ops, stack([item.camera for item in items])
        projections, inverses = camera.unbind(1)
        q, k, v = self.qkv_proj(x_BTD).chunk(3, dim=-1)
        squares_q, squares_k = squares_of_all_ranks(ops, self.parallel, q, k)
        q = ops.rms_project(q, squares_q, self.norm_q.weight, projections.mT, self.dim, self.eps)
        k = ops.rms_project(k, squares_k, self.norm_k.weight, inverses, self.dim, self.eps)
        parts = [
            part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, ops.project(v, inverses))
        ]
        of_heads = tokens_to_heads(self.parallel, parts, num_tokens)
        attended = stack([attention(*part) for part in zip(*of_heads, strict=True)])
        x = heads_to_tokens(self.parallel, attended).flatten(-2)
        update: torch.Tensor = self.out_proj(ops.project(x, projections))
        return update


class CameraBlock(WanBlock):
    """A block with a camera branch."""

    fused_ops: DreamXFusedOps

    def __init__(
        self,
        config: DreamXConfig,
        parallel: ParallelContext,
        fused_ops: DreamXFusedOps,
        index: int,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__(config, parallel, fused_ops, index, quant_config, prefix)
        self.patch_area = config.patch_size[1] * config.patch_size[2]
        self.cam_self_attn = CameraAttention(
            config, parallel, fused_ops, quant_config, f"{prefix}.cam_self_attn"
        )

    def takes_quantized(self) -> bool:
        return super().takes_quantized() and takes_quantized(self.cam_self_attn.qkv_proj)

    def attend(
        self,
        hidden_BTD: Input,
        items: Sequence[PosedItem],
        rope: tuple[torch.Tensor, torch.Tensor],
        exchange: WindowAttention,
        write_only: bool,
    ) -> torch.Tensor | None:
        attended = super().attend(hidden_BTD, items, rope, exchange, write_only)
        if attended is None:
            return None
        num_tokens = items[0].latents[0].numel() // self.patch_area
        camera: torch.Tensor = self.cam_self_attn(hidden_BTD, items, num_tokens)
        return attended + camera


class DreamXTransformer(ChunkTransformer[DreamXConfig]):
    """This rank's part of the network. The parameters of a new instance are uninitialised and use
    torch's default dtype and device.
    """

    fused_ops_type = DreamXFusedOps
    moving_fields = (*ChunkTransformer.moving_fields, "camera")

    def channels(self, item: ChunkItem) -> torch.Tensor:
        return item.latents

    def _block_type(self, layer: int) -> type[WanBlock]:
        return CameraBlock if layer in self.config.camera_blocks else WanBlock

    def camera(self, matrices_2F44: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """Return `PosedItem.camera` for a chunk of latent `size` [channels, F, h, w], given each
        latent frame's matrices (`projections`).
        """
        _, patch_height, patch_width = self.config.patch_size
        per_frame = size[2] * size[3] // (patch_height * patch_width)
        per_token = matrices_2F44.repeat_interleave(per_frame, dim=1)
        own = self.parallel.token_slice(per_token.shape[1])
        return to_device(per_token[:, own].contiguous(), self.device)
