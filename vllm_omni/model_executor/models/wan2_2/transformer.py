# SPDX-License-Identifier: Apache-2.0
"""The bidirectional transformer of Wan 2.1 and 2.2. One forward pass processes several videos at
different timesteps.

The module holds the parameters of one network on one rank and implements that rank's part of the
forward pass (a tensor-parallel shard, a pipeline stage, or a slice of the tokens). It does not
depend on requests, guidance or schedules. A batch entry attends to all of its tokens and to the 512
text embeddings of its prompt. Leading latent frames may be clean; the tokens of clean frames have
timestep 0 (`expand_timesteps` in Wan 2.2).

Maths: diffusers `WanTransformer3DModel` 0.42 (Wan-Video/Wan2.2, wan/modules/model.py).
"""

# B batch entries (one branch of one request each), L tokens of a video, T of them on this rank, D
# width, S text tokens, N heads (of this rank where sharded), H head dim, C = H/2 rotary channels

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.model_executor.layers.attention.attention import attention
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.wan.transformer.fused_ops import FusedOps
from vllm_omni.model_executor.models.wan.transformer.layers import (
    OutputHead,
    embed_time,
    unpatchify,
)
from vllm_omni.model_executor.models.wan.transformer.timesteps import TimestepEmbeddings
from vllm_omni.model_executor.models.wan.transformer.transformer import WanTransformer
from vllm_omni.model_executor.models.wan2_2.config import Wan22Config


class OwnTokens:
    """Replaces the K/V window in a bidirectional network. Each attention layer reads the K/V that
    the same layer has just written.
    """

    def __init__(self) -> None:
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, layer: int, frames: range, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        self._kv = (k_TNH, v_TNH)

    def write_slot(self, layer: int, frames: range) -> None:
        """Do nothing, because there is no cache."""

    def attend(self, layer: int, frames: range, q_TNH: torch.Tensor) -> torch.Tensor:
        assert self._kv is not None
        kv, self._kv = self._kv, None
        return attention(q_TNH, *kv)

    def quantized_ahead(self, frames: range) -> None:
        """Return None, because nothing is quantized."""


@dataclass(frozen=True)
class VideoItem:
    """One batch entry of a forward pass. All tensors are on the model's device."""

    inputs: torch.Tensor
    """Input of the network, [in_channels, F, h, w], in any float dtype."""
    timestep: float
    """Timestep of all frames except the first `clean_frames`, in [0, 1000]."""
    rope: tuple[torch.Tensor, torch.Tensor]
    """Rotary tables (cos_TC, sin_TC) of this rank's tokens, fp32."""
    cross_kv: torch.Tensor
    """Keys and values of the prompt, [layers, 2, S, N, H], from `cross_attention_kv`."""
    clean_frames: int = 0
    """Number of leading latent frames with timestep 0."""
    window: OwnTokens = field(default_factory=OwnTokens)
    """K/V of the current layer."""

    @property
    def frames(self) -> range:
        return range(self.inputs.shape[1])


class Wan22Transformer(WanTransformer[Wan22Config]):
    """The layers of one network on one rank. The constructor creates uninitialised parameters in
    torch's default dtype on torch's default device.
    """

    def __init__(
        self,
        config: Wan22Config,
        parallel: ParallelContext | None = None,
        *,
        compiled: bool = False,
        quantization: QuantizationConfig | None = None,
        prefix: str = "transformer",
    ) -> None:
        fused_ops = FusedOps.build(compiled)
        super().__init__(
            config,
            parallel,
            fused_ops,
            residual_fp32=True,
            quantization=quantization,
            prefix=prefix,
        )
        if self.parallel.last_stage:
            self.head = OutputHead(config, fused_ops)
        self.requires_grad_(False)

    def channels(self, item: VideoItem) -> torch.Tensor:
        return item.inputs.contiguous()

    def forward(
        self, items: Sequence[VideoItem], hidden_BTD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Predict the flow eps - x0 of every video.

        With tensor or sequence parallelism, this is a collective operation.

        Args:
            items: Batch entries, all with the same F, h and w.
            hidden_BTD: Result of the previous pipeline stage, or None on the first stage.

        Returns:
            On the last stage, the flow [B, out_channels, F, h, w], fp32; on earlier stages, hidden
            states.
        """
        size = items[0].inputs.shape[1:]
        num_tokens = self.num_tokens(items[0].inputs)
        head_times, block_times = self._times(
            items, num_tokens // size[0], self.parallel.token_slice(num_tokens)
        )
        x = self.through_blocks(items, hidden_BTD, block_times, num_tokens)
        if not self.parallel.last_stage:
            return x
        return unpatchify(self.parallel.gather_tokens(self.head(x, head_times), num_tokens), size)

    def modulation_of(self, timesteps: Sequence[float]) -> torch.Tensor:
        """Return the modulation of the blocks at each timestep, fp32 [S, 6 D]. The step cache
        compares the modulation of different steps.
        """
        layers = self.time_embedding, self.time_projection
        return embed_time(timesteps, self.config.freq_dim, *layers, self.device)[1].flatten(1)

    def _times(
        self, items: Sequence[VideoItem], tokens_per_frame: int, own: slice
    ) -> tuple[TimestepEmbeddings, TimestepEmbeddings]:
        """Return the timestep embeddings for the head and those for the blocks."""
        clean = any(item.clean_frames for item in items)
        timesteps = [*(item.timestep for item in items), *([0.0] if clean else [])]
        time, modulation = embed_time(
            timesteps, self.config.freq_dim, self.time_embedding, self.time_projection, self.device
        )
        times_B1D = time[: len(items)].unsqueeze(1)
        if not clean:
            return TimestepEmbeddings(times_B1D), TimestepEmbeddings(modulation)
        frame_T = torch.arange(own.start, own.stop, device=self.device) // tokens_per_frame
        marks = torch.stack([frame_T < item.clean_frames for item in items]).unsqueeze(-1)
        return TimestepEmbeddings(times_B1D, time[-1:], marks), TimestepEmbeddings(
            modulation[: len(items)], modulation[-1], marks
        )
