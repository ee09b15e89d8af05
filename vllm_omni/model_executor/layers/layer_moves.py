# SPDX-License-Identifier: Apache-2.0
"""How layers are spread over pipeline stages by their cost, and how they move when the spread changes.

`balanced_partition` chooses; `LayerMove` carries weights between stages with point-to-point sends, nothing else, in an
order that is the same on every stage. Knows no model.
Held by tests/model_executor/layers/test_layer_moves.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class StageCost:
    """The cost of a chunk on one stage, in milliseconds. fixed: everything but its layers (head, embedding, decode)."""

    layer_ms: float
    fixed_ms: float

    def total_ms(self, layers: int) -> float:
        return self.fixed_ms + layers * self.layer_ms


def balanced_partition(costs: Sequence[StageCost], num_layers: int) -> list[int]:
    """Return layers per stage, at least one each, such that the slowest stage is as fast as can be.

    Each further layer goes where the total is then least, which is optimal because every stage's cost only grows.
    """
    partition = [1] * len(costs)
    for _ in range(num_layers - len(costs)):
        cheapest = min(range(len(costs)), key=lambda stage: (costs[stage].total_ms(partition[stage] + 1), stage))
        partition[cheapest] += 1
    return partition


def stage_costs(
    steps_ms: Sequence[float], layers: Sequence[int], passes: int, once_ms: Sequence[float]
) -> list[StageCost]:
    """Split a stage's measured time into its layers and the rest.

    steps_ms: of one pass, by stage. layers: of each stage at that time. passes: of one chunk. once_ms: a
    stage's other work per chunk (decoding). A layer costs as much as on the stage with least work beside its layers.
    """
    layer_ms = min(ms / count for ms, count in zip(steps_ms, layers, strict=True))
    return [
        StageCost(passes * layer_ms, passes * (ms - count * layer_ms) + once)
        for ms, count, once in zip(steps_ms, layers, once_ms, strict=True)
    ]


class LayerMove:
    """One rank's part of a new partition. Collective: the ranks of one pipeline make the same calls in the same order.

    ranks: global ranks of the stages that hold layers, first stage first. before, after: layers of each.
    """

    def __init__(
        self, ranks: Sequence[int], stage: int, before: Sequence[int], after: Sequence[int], group: Any = None
    ) -> None:
        self._ranks, self._stage, self._group = ranks, stage, group
        self._before, self._after = _owners(before), _owners(after)
        self.partition = tuple(after)

    def modules(self, modules: nn.ModuleDict, make: Callable[[int], nn.Module]) -> nn.ModuleDict:
        """Layers by number, as this stage holds them -> as it holds them afterwards. make: an empty one, by number."""
        moved: dict[str, nn.Module] = {}
        for layer in range(len(self._before)):
            ours, theirs = self._before[layer] == self._stage, self._after[layer] == self._stage
            if not (ours or theirs):
                continue
            module = modules[str(layer)] if ours else make(layer)
            if ours is not theirs:
                for tensor in _tensors(module):
                    self._carry(layer, tensor, send=ours)
            if theirs:
                moved[str(layer)] = module
            else:
                _release(module)
        return nn.ModuleDict(moved)

    def _carry(self, layer: int, tensor: torch.Tensor, send: bool) -> None:
        if send:
            dist.send(tensor.contiguous(), dst=self._ranks[self._after[layer]], group=self._group)
        else:
            dist.recv(tensor, src=self._ranks[self._before[layer]], group=self._group)


def _owners(partition: Sequence[int]) -> list[int]:
    """The stage of each layer."""
    ends = list(accumulate(partition))
    return [next(stage for stage, end in enumerate(ends) if layer < end) for layer in range(ends[-1])]


def _release(module: nn.Module) -> None:
    """Free a layer's memory now: vLLM's parameters refer to their layers, so the layer waits for a collection."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        yield parameter.data
    yield from module.buffers()
