# SPDX-License-Identifier: Apache-2.0
"""The Wan 2.1 text-to-video transformer with explicit keys and values: one forward for several streams' chunks.

Owns the network's parameters and maths for this rank (a tensor-parallel part, a pipeline stage, or a token part) and
nothing of sessions, requests or schedules. A window that holds just a row's own frames makes this the bidirectional
Wan. The forward is `wan/chunk_transformer.py`'s. Maths: guandeh17/Self-Forcing @ 33593df, wan/modules/causal_model.py.
Held by tests/model_executor/models/causal_wan/test_causal_wan_parallel.py.
"""

# T tokens of a chunk on this rank, N heads (of this rank where sharded), H head dim, C = H/2 rotary lanes, S text
# tokens

from dataclasses import dataclass

import torch

from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.chunk_transformer import ChunkTransformer
from vllm_omni.model_executor.models.wan.layers import KVView


@dataclass(frozen=True)
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
    window: KVView


class CausalWanTransformer(ChunkTransformer[CausalWanConfig]):
    """This rank's part of the network. Parameters are created empty, in torch's default type and device."""

    def channels(self, row: ChunkRow) -> torch.Tensor:
        return row.latents
