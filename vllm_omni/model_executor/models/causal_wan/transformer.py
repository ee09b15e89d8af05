# SPDX-License-Identifier: Apache-2.0
"""The Wan 2.1 text-to-video transformer with explicit keys and values. One forward pass serves
chunks of several streams.

It contains the network's parameters and maths for this rank (a tensor-parallel shard, a pipeline
stage, or a part of the tokens), but no code for sessions, requests or schedules. With a window that
contains only the frames of the batch entry itself, this is the bidirectional Wan. The forward is
`transformer/chunk_transformer.py`'s. Maths: guandeh17/Self-Forcing @ 33593df,
wan/modules/causal_model.py. Held by
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

    Parameters are uninitialised and have torch's default dtype and device.
    """

    def channels(self, item: ChunkItem) -> torch.Tensor:
        return item.latents
