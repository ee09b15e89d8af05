# SPDX-License-Identifier: Apache-2.0
"""`StageNetwork`: a rank's blocks of a network, how they move between stages, and the graphs of its forwards.

Held by tests/model_executor/layers/test_layer_moves.py and the parallel tests of the models.
"""

from dataclasses import replace

import torch
from torch import nn

from vllm_omni.model_executor.layers.forward_graphs import ForwardGraphs
from vllm_omni.model_executor.layers.kept_memory import KeptMemory, Ring
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.layers.parallel import ParallelContext


class StageNetwork(nn.Module):
    """Base of a network of equal blocks. blocks: by number in the whole network. graphs: None = none are made."""

    parallel: ParallelContext
    blocks: nn.ModuleDict
    graphs: ForwardGraphs | None = None

    # -- of each network -----------------------------------------------------------------------------------------------

    @property
    def typed_weight(self) -> torch.Tensor:
        """A parameter that is always in the network's type and on its device."""
        raise NotImplementedError

    def empty_block(self, layer: int) -> nn.Module:
        """Make an empty block, by its number in the whole network, in torch's default type and device."""
        raise NotImplementedError

    # -- of all --------------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self.typed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.typed_weight.device

    @property
    def rings(self) -> KeptMemory[Ring] | None:
        """Where windows take their memory from; None = there are no graphs that knew it again."""
        return None if self.graphs is None else self.graphs.kept

    def forget(self) -> None:
        """Drop everything derived from weights (they were loaded anew or moved)."""
        if self.graphs is not None:
            self.graphs.forget()

    def move_layers(self, move: LayerMove) -> None:
        """Hold the blocks that this stage has after `move`, with their weights (collective)."""

        def empty(layer: int) -> nn.Module:
            with torch.device(self.device):
                block = self.empty_block(layer)
            return block.to(self.dtype).requires_grad_(False)

        self.blocks = move.modules(self.blocks, empty)
        self.parallel = replace(self.parallel, partition=move.partition)
        self.forget()
