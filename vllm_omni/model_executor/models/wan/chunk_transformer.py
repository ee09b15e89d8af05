# SPDX-License-Identifier: Apache-2.0
"""The base of the family's causal transformers: a forward of several sessions' chunks, with windows of keys and values.

A row attends to whatever its window shows it, without a mask: causality is in the window's content. No step of the
forward waits for the device: slots and lengths are host integers, tensors of each timestep stay on the device. It may
come by CUDA graphs.
Held by the tests of the families: tests/model_executor/models/causal_wan/test_causal_wan_graphs.py,
tests/model_executor/models/lingbot_world/test_lingbot_graphs.py.
"""

# B rows (one chunk of one session each), F frames, T tokens of a chunk on this rank, D width, N heads (of this rank
# where sharded), H head dim, C = H/2 rotary lanes, S rows of the context

import copy
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Protocol

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.model_executor.layers.attention import stack
from vllm_omni.model_executor.layers.forward_graphs import ForwardGraphs, Inputs
from vllm_omni.model_executor.layers.kv_cache import KVView
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.lora.active import addresses_key, weights_key
from vllm_omni.model_executor.models.wan.chains import Chains
from vllm_omni.model_executor.models.wan.layers import Head, embed_time, unpatchify
from vllm_omni.model_executor.models.wan.transformer import Config, WanTransformer

_KEPT_TIMESTEPS = 128
"""Timesteps whose embedding is kept: 43 KiB each at 1.3B; the motion controller alone has 101 values."""
_MOST_JOINED_BYTES: Final = 2 << 30
"""Of the inputs that graphs keep of a forward of several rows: warm-up counts the memory of one row's."""


class GraphView(KVView, Protocol):
    """A window whose forwards may come by graph.

    places: the tensors that both calls read and write in place. graph_key: all that both do to them but for numbers on
    the device. graph_kind: equal where the same kernels run, at other slots.
    """

    @property
    def places(self) -> tuple[torch.Tensor, ...]: ...

    def graph_key(self, frames: range) -> Hashable: ...

    def graph_kind(self, frames: range) -> Hashable: ...


@dataclass(frozen=True, kw_only=True)
class ChunkRow:
    """Inputs of one row of a forward; tensors on the model's device, made once per chunk except `latents`.

    latents: fp32 [16, F, h, w], noisy (or clean, at the context timestep). timestep: in [0, 1000]. frames: absolute
    latent frames of the chunk. rope: (cos_TC, sin_TC) fp32. cross_kv: [layers, 2, S, N, H] of `cross_attention_kv`.
    window: written at `frames`. Layers are those of this stage.
    """

    latents: torch.Tensor
    timestep: float
    frames: range
    rope: tuple[torch.Tensor, torch.Tensor]
    cross_kv: torch.Tensor
    window: GraphView


@dataclass(frozen=True, kw_only=True)
class ImageRow(ChunkRow):
    """A row of a world that begins with an image. condition: [20, F, h, w], mask and latents; of the first stage."""

    condition: torch.Tensor | None


class ChunkTransformer(WanTransformer[Config]):
    """This rank's part of a network. Its rows are `ChunkRow`s.

    compiled: fuse the elementwise chains with torch.compile. cuda_graphs: launch forwards as graphs (`ForwardGraphs`).
    """

    chains_type: ClassVar[type[Chains]] = Chains
    moving_fields: ClassVar[tuple[str, ...]] = ("latents",)
    """Of a row: tensors, or lists of them, that are others at the next forward; they may be None. So are `cross_kv` and
    `rope`."""
    steady_fields: ClassVar[tuple[str, ...]] = ("cross_kv",)
    """Of these, the large ones that nobody writes to once they are made."""

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
        chains = self.chains_type.build(compiled)
        super().__init__(config, parallel, chains, residual_fp32=residual_fp32, quantization=quantization)
        if self.parallel.last_stage:
            self.head = Head(config, chains)
        self._times: OrderedDict[Hashable, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self.graphs = ForwardGraphs() if cuda_graphs else None
        self._add_layers()
        self.requires_grad_(False)

    def _add_layers(self) -> None:
        """Make a family's layers beside the blocks."""

    def window_sizes(self, tokens_per_frame: int) -> dict[str, Any]:
        """Return the arguments of this rank's `KVWindow`s except their frames and storage."""
        return {
            "num_layers": self.num_local_layers,
            "tokens_per_frame": tokens_per_frame,
            "num_heads": self.num_cache_heads,
            "head_dim": self.config.head_dim,
            "dtype": self.dtype,
        }

    def forget(self) -> None:
        super().forget()
        self._times.clear()

    def forward(
        self, rows: Sequence[Any], hidden_BTD: torch.Tensor | None = None, *, kv_only: bool = False
    ) -> torch.Tensor:
        """Predict the flow eps - x0 of every row, [B, 16, F, h, w] fp32, and write each row's K/V at its frames.

        Rows share F, h, w. `hidden_BTD` is the previous stage's result; stages before the last return theirs.
        `kv_only` (no row's prediction is needed): the last stage stops after its last K/V write and returns zeros.
        Collective under tensor and sequence parallelism.
        """
        times = [self._time(row.timestep) for row in rows]
        time_BD = stack([time for time, _ in times])
        time_B6D = stack([modulation for _, modulation in times])
        if self.graphs is None:
            return self._predict(rows, hidden_BTD, time_BD, time_B6D, kv_only)
        inputs = {"time": time_BD, "modulation": time_B6D}
        if hidden_BTD is not None:
            inputs["hidden"] = hidden_BTD
        for number, row in enumerate(rows):
            inputs |= {f"{number} {name}": tensor for name, tensor in self._moving(row).items()}
        if len(rows) > 1 and sum(tensor.nbytes for tensor in inputs.values()) > _MOST_JOINED_BYTES:
            return self._predict(rows, hidden_BTD, time_BD, time_B6D, kv_only)
        held = [replace(row, window=copy.copy(row.window)) for row in rows]  # a closed window lets go of its memory

        def predict(own: Inputs) -> torch.Tensor:
            placed = [self._placed(number, row, own) for number, row in enumerate(held)]
            return self._predict(placed, own.get("hidden"), own["time"], own["modulation"], kv_only)

        kind = None  # for the same rows seldom come together again
        if len(rows) == 1:
            kind = rows[0].window.graph_kind(rows[0].frames), addresses_key()
        return self.graphs(
            (kv_only, tuple(row.window.graph_key(row.frames) for row in rows), addresses_key()),
            inputs,
            predict,
            places=[place for row in rows for place in row.window.places],
            kind=kind,
            whole=not kv_only,
            steady=[name for name in inputs if name.partition(" ")[2].partition(".")[0] in self.steady_fields],
        )

    def _moving(self, row: Any) -> Inputs:
        """The tensors of a row that are others at the next forward, by field; of a list, by field and place in it."""
        cos, sin = row.rope
        moving: Inputs = {"cos": cos, "sin": sin}
        for name in ("cross_kv", *self.moving_fields):
            value = getattr(row, name)
            if isinstance(value, list):
                moving |= {f"{name}.{place}": tensor for place, tensor in enumerate(value)}
            elif value is not None:
                moving[name] = value
        return moving

    def _placed(self, number: int, row: Any, own: Inputs) -> Any:
        """The row of that number with its moving tensors among `own`."""
        moving: dict[str, Any] = {}
        for name in self._moving(row):
            field, _, place = name.partition(".")
            tensor = own[f"{number} {name}"]
            if place:
                moving.setdefault(field, []).append(tensor)
            else:
                moving[field] = tensor
        return replace(row, rope=(moving.pop("cos"), moving.pop("sin")), **moving)

    def _predict(
        self,
        rows: Sequence[Any],
        hidden_BTD: torch.Tensor | None,
        time_BD: torch.Tensor,
        time_B6D: torch.Tensor,
        kv_only: bool,
    ) -> torch.Tensor:
        """`forward`, given the rows' time embeddings."""
        latents = rows[0].latents
        num_tokens = self.num_tokens(latents)
        x = self.through_blocks(rows, hidden_BTD, time_B6D, num_tokens, kv_only=kv_only)
        if not self.parallel.last_stage:
            return x
        if kv_only:
            return latents.new_zeros(len(rows), *latents.shape)
        patches = self.parallel.gather_tokens(self.head(x, time_BD), num_tokens)
        return unpatchify(patches, latents.shape[1:])

    def _time(self, timestep: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return e [D] and its six modulation rows E [6, D] of a timestep, fp32; computed once for equal weights."""
        key = timestep, weights_key()
        known = self._times.get(key)
        if known is None:
            time_BD, time_B6D = embed_time(
                [timestep], self.config.freq_dim, self.time_embedding, self.time_projection, self.device
            )
            while len(self._times) >= _KEPT_TIMESTEPS:
                self._times.popitem(last=False)
            known = self._times[key] = (time_BD[0], time_B6D[0])
        self._times.move_to_end(key)
        return known


class ImageTransformer(ChunkTransformer[Config]):
    """This rank's part of a network whose rows are `ImageRow`s."""

    moving_fields: ClassVar[tuple[str, ...]] = ("latents", "condition")

    def channels(self, row: ImageRow) -> torch.Tensor:
        """The 36 input channels: noisy latents, then mask and condition."""
        assert row.condition is not None, "the first stage needs the condition"
        return torch.cat((row.latents, row.condition.to(row.latents)))
