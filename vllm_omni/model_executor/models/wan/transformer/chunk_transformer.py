# SPDX-License-Identifier: Apache-2.0
"""Base class of the causal Wan transformers. One forward pass processes chunks from several
sessions, each with its own K/V window.

A chunk attends to its whole window without a mask, because the window contains only visible frames.
The forward pass never synchronises the host with the device, because slots and lengths are integers
on the host and timestep tensors stay on the device. Forward passes can be replayed as CUDA graphs.
"""

# B batch entries (one chunk of one session each), F frames, T tokens of a chunk on this rank, D
# width, N heads (of this rank where sharded), H head dim, C = H/2 rotary channels, S sequence
# length of the context

import copy
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Protocol

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.attention.attention import stack
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs, Inputs
from vllm_omni.model_executor.layers.kv_cache.window import KVView
from vllm_omni.model_executor.layers.lora.active import addresses_key, weights_key
from vllm_omni.model_executor.models.wan.transformer.fused_ops import FusedOps
from vllm_omni.model_executor.models.wan.transformer.layers import (
    OutputHead,
    embed_time,
    unpatchify,
)
from vllm_omni.model_executor.models.wan.transformer.timesteps import TimestepEmbeddings
from vllm_omni.model_executor.models.wan.transformer.transformer import Config, WanTransformer

_KEPT_TIMESTEPS = 128
"""Maximum number of cached timestep embeddings (43 KiB each for a 1.3B model). The motion
controller alone uses 101 timesteps.
"""
_MOST_JOINED_BYTES: Final = 2 << 30
"""Maximum size in bytes of the graph inputs for a batch with several chunks. Larger batches run
without a CUDA graph, because warm-up measures graph memory for only one chunk.
"""


class GraphView(KVView, Protocol):
    """A K/V window for forward passes in CUDA graphs.

    `buffers` are the tensors that `write` and `attend` access in place. For two windows with the
    same `graph_key`, `write` and `attend` run the same kernels on the same slots, and only values
    on the device may differ. For two windows with the same `graph_kind`, `write` and `attend` run
    the same kernels, but possibly on different slots.
    """

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]: ...

    def graph_key(self, frames: range) -> Hashable: ...

    def graph_kind(self, frames: range) -> Hashable: ...


@dataclass(frozen=True, kw_only=True)
class ChunkItem:
    """Inputs for one batch entry. All tensors are on the model's device. Except for `latents`, they
    are created once per chunk.
    """

    latents: torch.Tensor
    """Latents, fp32 [16, F, h, w]. They are clean in the clean-context pass, otherwise noisy."""
    timestep: float
    """Timestep of the forward pass, in [0, 1000]."""
    frames: range
    """Absolute indices of the chunk's latent frames."""
    rope: tuple[torch.Tensor, torch.Tensor]
    """Rotary tables (cos_TC, sin_TC) for the chunk's tokens on this rank, fp32."""
    cross_kv: torch.Tensor
    """Result of `cross_attention_kv` for this stage's layers, [layers, 2, S, N, H]."""
    window: GraphView
    """The session's K/V window. The forward pass writes the K/V of `frames` to it."""
    clean_tokens: int = 0
    """Number of the chunk's leading tokens, counted across all ranks, that have timestep 0 instead
    of `timestep`, because their latents are never noisy.
    """
    lead_tokens: int = 0
    """Number of the chunk's tokens, counted across all ranks, that precede the tokens of `latents`.
    `WanTransformer.embed` creates these tokens, and the network makes no prediction for them.
    """


@dataclass(frozen=True, kw_only=True)
class ImageItem(ChunkItem):
    """A batch entry for a session that starts from an image."""

    condition: torch.Tensor | None
    """Conditioning (mask and latents) [20, F, h, w]. None on stages after the first."""


class ChunkTransformer(WanTransformer[Config]):
    """One rank's layers of a causal network. Batch entries are `ChunkItem`s.

    Args:
        config: The network's dimensions.
        parallel: This rank's parallelism. Default: one rank.
        residual_fp32: Whether to keep the residual stream in fp32.
        compiled: Whether to compile the fused pointwise ops with torch.compile.
        cuda_graphs: Whether to replay forward passes as CUDA graphs (`ForwardGraphs`).
        quantization: vLLM's config for `--quantization`.
    """

    fused_ops_type: ClassVar[type[FusedOps]] = FusedOps
    """Class of the model's fused pointwise ops."""
    moving_fields: ClassVar[tuple[str, ...]] = ("latents",)
    """Batch entry fields that change between forward passes, in addition to `cross_kv` and `rope`.
    Their values are tensors, lists of tensors, or None."""
    steady_fields: ClassVar[tuple[str, ...]] = ("cross_kv",)
    """Large fields that change between forward passes. Their tensors are never written to after
    creation.
    """

    def __init__(
        self,
        config: Config,
        parallel: ParallelContext | None = None,
        *,
        residual_fp32: bool = True,
        compiled: bool = False,
        cuda_graphs: bool = False,
        quantization: QuantizationConfig | None = None,
    ) -> None:
        fused_ops = self.fused_ops_type.build(compiled)
        super().__init__(
            config, parallel, fused_ops, residual_fp32=residual_fp32, quantization=quantization
        )
        if self.parallel.last_stage:
            self.head = OutputHead(config, fused_ops)
        self._times: OrderedDict[Hashable, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self.graphs = ForwardGraphs() if cuda_graphs else None
        self._add_layers()
        self.requires_grad_(False)

    def _add_layers(self) -> None:
        """Build the layers that a model family has in addition to the blocks."""

    def window_sizes(self, tokens_per_frame: int) -> dict[str, Any]:
        """Return the constructor arguments for a `KVWindow` on this rank, except those for its
        frames and storage.
        """
        return {
            "num_layers": self.num_local_layers,
            "tokens_per_frame": tokens_per_frame,
            "num_heads": self.num_cache_heads,
            "head_dim": self.config.head_dim,
            "dtype": self.dtype,
        }

    def clear_derived(self) -> None:
        super().clear_derived()
        self._times.clear()

    def forward(
        self, items: Sequence[Any], hidden_BTD: torch.Tensor | None = None, *, kv_only: bool = False
    ) -> torch.Tensor:
        """Predict each chunk's flow eps - x0, and write the chunk's K/V to its window.

        This method is collective under tensor or sequence parallelism.

        Args:
            items: Chunks with equal F, h, w and `lead_tokens`.
            hidden_BTD: Result of the previous pipeline stage. None on the first stage.
            kv_only: Whether only the K/V are required. If so, the last stage stops after its last
                K/V write and returns zeros.

        Returns:
            On the last stage, the flow, fp32 [B, 16, F, h, w]. On earlier stages, the hidden
            states.
        """
        inputs = self._time_inputs(items)
        if self.graphs is None:
            return self._predict(items, hidden_BTD, inputs, kv_only)
        if hidden_BTD is not None:
            inputs["hidden"] = hidden_BTD
        for number, batch_item in enumerate(items):
            inputs |= {
                f"{number} {name}": tensor for name, tensor in self._moving(batch_item).items()
            }
        if len(items) > 1 and sum(tensor.nbytes for tensor in inputs.values()) > _MOST_JOINED_BYTES:
            return self._predict(items, hidden_BTD, inputs, kv_only)
        # The graph holds copies of the window objects, because a closed window drops its reference
        # to the memory.
        held = [replace(batch_item, window=copy.copy(batch_item.window)) for batch_item in items]

        def predict(own: Inputs) -> torch.Tensor:
            placed = [self._placed(number, item, own) for number, item in enumerate(held)]
            return self._predict(placed, own.get("hidden"), own, kv_only)

        kind = None  # the same chunks are rarely batched together again
        if len(items) == 1:
            kind = items[0].window.graph_kind(items[0].frames), addresses_key()
        return self.graphs(
            (
                kv_only,
                tuple(batch_item.window.graph_key(batch_item.frames) for batch_item in items),
                addresses_key(),
            ),
            inputs,
            predict,
            buffers=[position for batch_item in items for position in batch_item.window.buffers],
            kind=kind,
            whole=not kv_only,
            steady=[
                name
                for name in inputs
                if name.partition(" ")[2].partition(".")[0] in self.steady_fields
            ],
        )

    def _moving(self, item: Any) -> Inputs:
        """Return a batch entry's tensors that change between forward passes, keyed by name. A name
        consists of the field and, for lists, the index.
        """
        cos, sin = item.rope
        moving: Inputs = {"cos": cos, "sin": sin}
        for name in ("cross_kv", *self.moving_fields):
            value = getattr(item, name)
            if isinstance(value, list):
                moving |= {f"{name}.{position}": tensor for position, tensor in enumerate(value)}
            elif value is not None:
                moving[name] = value
        return moving

    def _placed(self, number: int, item: Any, own: Inputs) -> Any:
        """Return a copy of the batch entry with its changing tensors replaced by those in `own`."""
        moving: dict[str, Any] = {}
        for name in self._moving(item):
            field, _, position = name.partition(".")
            tensor = own[f"{number} {name}"]
            if position:
                moving.setdefault(field, []).append(tensor)
            else:
                moving[field] = tensor
        return replace(item, rope=(moving.pop("cos"), moving.pop("sin")), **moving)

    def _predict(
        self,
        items: Sequence[Any],
        hidden_BTD: torch.Tensor | None,
        times: Inputs,
        kv_only: bool,
    ) -> torch.Tensor:
        """Run the forward pass. `times` is the result of `_time_inputs`."""
        latents, lead_tokens = items[0].latents, items[0].lead_tokens
        num_tokens = lead_tokens + self.num_tokens(latents)
        marks_BT1 = times.get("clean tokens")
        block_times = TimestepEmbeddings(
            times["modulation"], times.get("clean modulation"), marks_BT1
        )
        head_times = TimestepEmbeddings(
            times["time"].unsqueeze(1), times.get("clean time"), marks_BT1
        )
        x = self.through_blocks(items, hidden_BTD, block_times, num_tokens, kv_only=kv_only)
        if not self.parallel.last_stage:
            return x
        if kv_only:
            return latents.new_zeros(len(items), *latents.shape)
        patches = self.parallel.gather_tokens(self.head(x, head_times), num_tokens)
        return unpatchify(patches[:, lead_tokens:], latents.shape[1:])

    def _time_inputs(self, items: Sequence[Any]) -> Inputs:
        """Return a batch's timestep embeddings, keyed by name: `time` [B, D] and `modulation`
        [B, 6, D].

        If a batch entry has clean tokens, the result also contains the embeddings of timestep 0,
        [1, D] and [6, D], and a mask of this rank's clean tokens, bool [B, T, 1].
        """
        times = [self._time(item.timestep) for item in items]
        inputs = {
            "time": stack([time for time, _ in times]),
            "modulation": stack([modulation for _, modulation in times]),
        }
        if any(item.clean_tokens for item in items):
            clean_D, clean_6D = self._time(0.0)
            num_tokens = items[0].lead_tokens + self.num_tokens(items[0].latents)
            own = self.parallel.token_slice(num_tokens)
            tokens_T = torch.arange(own.start, own.stop)
            marks = torch.stack([tokens_T < item.clean_tokens for item in items]).unsqueeze(-1)
            inputs |= {
                "clean time": clean_D.unsqueeze(0),
                "clean modulation": clean_6D,
                "clean tokens": to_device(marks, self.device),
            }
        return inputs

    def _time(self, timestep: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a timestep's embedding e [D] and its six modulation vectors E [6, D], fp32.

        The result is cached until the weights change.
        """
        key = timestep, weights_key()
        known = self._times.get(key)
        if known is None:
            time_BD, time_B6D = embed_time(
                [timestep],
                self.config.freq_dim,
                self.time_embedding,
                self.time_projection,
                self.device,
            )
            while len(self._times) >= _KEPT_TIMESTEPS:
                self._times.popitem(last=False)
            known = self._times[key] = (time_BD[0], time_B6D[0])
        self._times.move_to_end(key)
        return known


class ImageTransformer(ChunkTransformer[Config]):
    """One rank's layers of a causal network. Batch entries are `ImageItem`s."""

    moving_fields: ClassVar[tuple[str, ...]] = ("latents", "condition")

    def channels(self, item: ImageItem) -> torch.Tensor:
        """Return the 36 input channels: the noisy latents, followed by the conditioning (mask and
        latents).
        """
        assert item.condition is not None, "the first stage needs the condition"
        return torch.cat((item.latents, item.condition.to(item.latents)))
