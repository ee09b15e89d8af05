# SPDX-License-Identifier: Apache-2.0
"""The Wan 2.1 text-to-video transformer with an explicit K/V cache. One forward pass can process
chunks from several streams.

The module contains the network's parameters and maths for this rank (a tensor-parallel shard, a
pipeline stage, or some of the tokens). It contains no code for sessions, requests or schedules. If
a window contains only the frames of the batch entry itself, the network is equivalent to the
bidirectional Wan. `wan/transformer/chunk_transformer.py` implements the forward pass. Maths:
guandeh17/Self-Forcing @ 33593df, wan/modules/causal_model.py. Tested by
tests/model_executor/models/causal_wan/test_causal_wan_parallel.py.
"""

import torch

from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.transformer.chunk_transformer import (
    ChunkItem,
    ChunkTransformer,
)


class CausalWanTransformer(ChunkTransformer[CausalWanConfig]):
    """This rank's part of the network.

    The parameters of a new instance are uninitialised and use torch's default dtype and device.
    """

    def channels(self, item: ChunkItem) -> torch.Tensor:
        return item.latents
