# SPDX-License-Identifier: Apache-2.0
"""The causal diffusion transformer of LingBot-World-Fast. One forward pass can process chunks from
several sessions.

The module contains the network's parameters and maths for this rank (a tensor-parallel shard, a
pipeline stage, or some of the tokens). It does not depend on sessions, requests or schedules,
because each batch entry provides its own K/V window, camera modulation and cross-attention K/V.
Maths: Robbyant/lingbot-world @ a43bec7, wan/modules/model_fast.py.

The base classes are in `wan/transformer/transformer.py` and, for the forward pass,
`wan/transformer/chunk_transformer.py`.
"""

# B batch entries (one chunk of one session each), L tokens of a chunk, T of them on this rank, D
# width, N heads (of this rank where sharded), H head dim, C = H/2 rotary channels, S text tokens

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

from vllm_omni.model_executor.layers.attention.attention import stack
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.linear.int8_weights import takes_int8
from vllm_omni.model_executor.layers.linear.linear import ColumnLinear, LinearPrecision, RowLinear
from vllm_omni.model_executor.layers.linear.quantized_input import Input, takes_quantized
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.world_pose import WORLD_FEATURES
from vllm_omni.model_executor.models.wan.architecture import WanConfig
from vllm_omni.model_executor.models.wan.transformer.chunk_transformer import (
    ImageItem,
    ImageTransformer,
)
from vllm_omni.model_executor.models.wan.transformer.fused_ops import FusedOps
from vllm_omni.model_executor.models.wan.transformer.layers import patchify, stack_inputs
from vllm_omni.model_executor.models.wan.transformer.transformer import WanBlock


@dataclass(frozen=True, kw_only=True)
class CameraItem(ImageItem):
    """A batch entry with camera modulation."""

    camera: list[torch.Tensor]
    """Result of `LingBotTransformer.camera_modulation`: one tensor [2, T, D] per layer, with the
    factor and the shift.
    """


class CameraBlock(WanBlock):
    """A Wan block that applies the camera modulation to the residual stream between self-attention
    and cross-attention.
    """

    def __init__(
        self,
        config: WanConfig,
        parallel: ParallelContext,
        fused_ops: FusedOps,
        index: int,
        quant_config: LinearPrecision,
        prefix: str,
    ) -> None:
        super().__init__(config, parallel, fused_ops, index, quant_config, prefix)
        dim = config.dim
        self.cam_injector_layer1 = ColumnLinear(
            dim, dim, parallel, quant_config, f"{prefix}.cam_injector_layer1"
        )
        self.cam_injector_layer2 = RowLinear(
            dim, dim, parallel, quant_config, f"{prefix}.cam_injector_layer2"
        )
        self.cam_scale_layer = ColumnLinear(
            dim, dim, parallel, quant_config, f"{prefix}.cam_scale_layer"
        )
        self.cam_shift_layer = ColumnLinear(
            dim, dim, parallel, quant_config, f"{prefix}.cam_shift_layer"
        )
        self.parallel = parallel

    @property
    def camera_layers(self) -> tuple[ColumnLinear | RowLinear, ...]:
        return (
            self.cam_injector_layer1,
            self.cam_injector_layer2,
            self.cam_scale_layer,
            self.cam_shift_layer,
        )

    def camera_modulation(
        self, camera_TD: torch.Tensor, quantized: QuantizedActivation | None, out_2TD: torch.Tensor
    ) -> None:
        """Write the block's camera factor (1 + scale) and shift into `out_2TD`.

        Args:
            camera_TD: The camera's embedding.
            quantized: The embedding in int8 if the block's camera layers accept int8 inputs
                (`takes_int8`), else None.
            out_2TD: Tensor for the factor and the shift.
        """
        hidden: Input
        first, second, of_scale, of_shift = self.camera_layers
        if quantized is None:
            hidden = second(functional.silu(first(camera_TD))) + camera_TD
        else:
            from vllm_omni.model_executor.layers.triton_rows import int8_rows

            hidden = int8_rows(second(int8_rows(first(quantized), silu=True)), camera_TD)
        torch.add(self.parallel.all_gather_channels(of_scale(hidden)), 1, out=out_2TD[0])
        out_2TD[1] = self.parallel.all_gather_channels(of_shift(hidden))

    def after_self_attention(
        self,
        x_BTD: torch.Tensor,
        attended_BTD: torch.Tensor,
        gate: torch.Tensor,
        items: Sequence[CameraItem],
    ) -> tuple[torch.Tensor, Input]:
        norm3, quantized = self.norm3, takes_quantized(self.cross_attn.q)
        moved = [
            self.fused_ops.after_self_attention(
                x_TD,
                update_TD,
                gate_1D,
                norm3.weight,
                norm3.bias,
                self.eps,
                item.camera[self.index].unbind(),
                quantized,
            )
            for item, x_TD, update_TD, gate_1D in zip(items, x_BTD, attended_BTD, gate, strict=True)
        ]
        return stack([x_TD for x_TD, _ in moved]), stack_inputs(
            [hidden_TD for _, hidden_TD in moved]
        )


class LingBotTransformer(ImageTransformer[LingBotWorldConfig]):
    """One rank's transformer layers. The constructor creates uninitialised parameters with torch's
    default dtype, on torch's default device.
    """

    block_type = CameraBlock
    moving_fields = (*ImageTransformer.moving_fields, "camera")
    steady_fields = (*ImageTransformer.steady_fields, "camera")
    int8_weights = ("blocks.*.cam_*",)
    """Layers whose weights are int8 rather than FP8. These layers run only once per chunk, and FP8
    would reduce the quality of the demo world by about 0.1 dB.
    """

    def _add_layers(self) -> None:
        config = self.config
        dim, patch = config.dim, config.patch_size[1] * config.patch_size[2]
        self.patch_embedding_wancamctrl = nn.Linear(config.camera_channels * patch, dim)
        self.c2ws_hidden_states_layer1 = nn.Linear(dim, dim)
        self.c2ws_hidden_states_layer2 = nn.Linear(dim, dim)
        self.takes_world_pose = config.control_type == "world"
        if self.takes_world_pose:
            self.world_pose_layer1 = nn.Linear(WORLD_FEATURES, dim)
            self.world_pose_layer2 = nn.Linear(dim, dim)

    def camera_modulation(
        self, camera: torch.Tensor, world: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return the factor and shift for each layer, [2, T, D] in the model's dtype.

        The modulation is the same for all of a chunk's denoise steps and takes up 3.57 GiB at
        480x832. Each layer has a separate tensor, because one tensor for all layers would require a
        contiguous free block of 3.57 GiB, which may not exist in memory fragmented by decoder
        caches. The call is collective under tensor parallelism.

        Args:
            camera: Control map [384 or 448, F, h, w].
            world: World-pose features for the tokens of all ranks, fp32 [tokens, WORLD_FEATURES].
                None if the model is not a `world` model.
        """
        own = self.parallel.token_slice(self.num_tokens(camera))
        tokens = patchify(camera)[own]
        patches_TD = self.patch_embedding_wancamctrl(tokens.to(self.device, self.dtype))
        hidden = self.c2ws_hidden_states_layer2(
            functional.silu(self.c2ws_hidden_states_layer1(patches_TD))
        )
        camera_TD = patches_TD + hidden
        if self.takes_world_pose:
            assert world is not None
            features = world[own].to(self.device, self.dtype)
            camera_TD = camera_TD + self.world_pose_layer2(
                functional.silu(self.world_pose_layer1(features))
            )
        shape = 2, *camera_TD.shape
        out = [camera_TD.new_empty(shape) for _ in range(self.num_local_layers)]
        quantized = None
        if takes_int8(layer for block in self._blocks() for layer in block.camera_layers):
            from vllm_omni.model_executor.layers.triton_rows import int8_rows

            quantized = int8_rows(camera_TD)
        for block, out_2TD in zip(self._blocks(), out, strict=True):
            block.camera_modulation(camera_TD, quantized, out_2TD)
        return out
