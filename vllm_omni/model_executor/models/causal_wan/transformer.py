# SPDX-License-Identifier: Apache-2.0
"""The Wan 2.1 text-to-video transformer with explicit keys and values: one forward for several streams' chunks.

Owns the network's parameters and maths for this rank (a tensor-parallel part, a pipeline stage, or a token part) and
nothing of sessions, requests or schedules. A row attends to whatever its window shows it, without a mask: causality is
in the window's content, and a window that holds just the row's own frames makes this the bidirectional Wan.

No step of the forward waits for the device: slots and lengths are host integers, what depends on the timestep is kept
on the device by timestep. Where the window is full a forward may come by a CUDA graph.
Maths: guandeh17/Self-Forcing @ 33593df, wan/modules/causal_model.py.
Held by tests/model_executor/models/causal_wan/test_causal_wan_parallel.py.
"""

# B rows (one chunk of one session each), L tokens of a chunk, T of them on this rank, D width, N heads (of this rank
# where sharded), H head dim, C = H/2 rotary lanes, S text tokens

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_omni.model_executor.layers.forward_graphs import ForwardGraphs, Inputs, identity
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.chains import Chains
from vllm_omni.model_executor.models.wan.layers import Head, KVView, embed_time, stack, unpatchify
from vllm_omni.model_executor.models.wan.transformer import WanTransformer

_KEPT_TIMESTEPS = 128
"""Timesteps whose embedding is kept: 43 KiB each at 1.3B; the motion controller alone has 101 values."""


@dataclass(frozen=True)
class ChunkRow:
    """What one row of a forward brings; tensors on the model's device, made once per chunk except `latents`.

    latents: fp32 [16, F, h, w], noisy (or clean, at the context timestep). timestep: in [0, 1000]. frames: absolute
    latent frames of the chunk. rope: (cos_TC, sin_TC) fp32. cross_kv: [layers, 2, S, N, H] of `cross_attention_kv`.
    window: written at `frames`. Layers are those of this stage.
    """

    latents: torch.Tensor
    timestep: float
    frames: range
    rope: tuple[torch.Tensor, torch.Tensor]
    cross_kv: torch.Tensor
    window: KVView


class CausalWanTransformer(WanTransformer[CausalWanConfig]):
    """This rank's part of the network. Parameters are created empty, in torch's default type and device."""

    def __init__(
        self,
        config: CausalWanConfig,
        parallel: ParallelContext | None = None,
        *,
        residual_fp32: bool = True,
        compiled: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        chains = Chains.build(compiled)
        super().__init__(config, parallel, chains, residual_fp32=residual_fp32)
        if self.parallel.last_stage:
            self.head = Head(config, chains)
        self.requires_grad_(False)
        self._times: OrderedDict[float, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self.graphs = ForwardGraphs() if cuda_graphs else None

    def channels(self, row: ChunkRow) -> torch.Tensor:
        return row.latents

    def forget(self) -> None:
        self._times.clear()
        if self.graphs is not None:
            self.graphs.forget()

    def forward(
        self, rows: Sequence[ChunkRow], hidden_BTD: torch.Tensor | None = None, *, kv_only: bool = False
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
        inputs = {
            "latents": stack([row.latents for row in rows]),
            "cos": stack([row.rope[0] for row in rows]),
            "sin": stack([row.rope[1] for row in rows]),
            "time": time_BD,
            "modulation": time_B6D,
            **({} if hidden_BTD is None else {"hidden": hidden_BTD}),
        }

        def predict(own: Inputs) -> torch.Tensor:
            moving = zip(rows, own["latents"], own["cos"], own["sin"], strict=True)
            placed = [replace(row, latents=latents, rope=(cos, sin)) for row, latents, cos, sin in moving]
            return self._predict(placed, own.get("hidden"), own["time"], own["modulation"], kv_only)

        return self.graphs(_graph_key(rows, kv_only), inputs, predict)

    def _predict(
        self,
        rows: Sequence[ChunkRow],
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
        """Return e [D] and its six modulation rows E [6, D] of a timestep, fp32; computed once."""
        known = self._times.get(timestep)
        if known is None:
            time_BD, time_B6D = embed_time(
                [timestep], self.config.freq_dim, self.time_embedding, self.time_projection, self.device
            )
            while len(self._times) >= _KEPT_TIMESTEPS:
                self._times.popitem(last=False)
            known = self._times[timestep] = (time_BD[0], time_B6D[0])
        self._times.move_to_end(timestep)
        return known


def _graph_key(rows: Sequence[ChunkRow], kv_only: bool) -> Hashable | None:
    """What a forward of `rows` does but for numbers on the device; None = it does not come again."""
    keys = [row.window.graph_key(row.frames) for row in rows]
    if any(key is None for key in keys):
        return None
    return kv_only, tuple(keys), tuple(identity(row.cross_kv) for row in rows)
