# SPDX-License-Identifier: Apache-2.0
"""Balances layers across pipeline stages by measured cost, and moves layers when the balance
changes.

`balanced_partition` computes the partition. `LayerMove` moves weights between stages using only
point-to-point sends, in the same order on every stage. The module contains no model-specific code.
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
    """Time that one chunk takes on one pipeline stage."""

    layer_ms: float
    """Time in milliseconds that a chunk spends in one layer."""
    fixed_ms: float
    """Time in milliseconds that a chunk spends outside the layers (head, embedding, decode)."""

    def total_ms(self, layers: int) -> float:
        return self.fixed_ms + layers * self.layer_ms


def balanced_partition(costs: Sequence[StageCost], num_layers: int) -> list[int]:
    """Return the number of layers per stage, at least one each, that minimises the slowest stage's
    time.

    The greedy choice (each additional layer is assigned to the stage with the smallest resulting
    total) is optimal, because a stage's cost increases with each layer.
    """
    partition = [1] * len(costs)
    for _ in range(num_layers - len(costs)):
        cheapest = min(
            range(len(costs)),
            key=lambda stage: (costs[stage].total_ms(partition[stage] + 1), stage),
        )
        partition[cheapest] += 1
    return partition


def stage_costs(
    steps_ms: Sequence[float], layers: Sequence[int], passes: int, once_ms: Sequence[float]
) -> list[StageCost]:
    """Split each stage's measured time into the time spent in its layers and the remaining time.

    A layer's cost is taken from the stage with the lowest time per layer.

    Args:
        steps_ms: Time in milliseconds that one forward pass takes on each stage.
        layers: Number of layers on each stage during the measurement.
        passes: Number of forward passes per chunk.
        once_ms: Time in milliseconds that each stage spends per chunk on work that is done once,
            such as decoding.
    """
    layer_ms = min(ms / count for ms, count in zip(steps_ms, layers, strict=True))
    return [
        StageCost(passes * layer_ms, passes * (ms - count * layer_ms) + once)
        for ms, count, once in zip(steps_ms, layers, once_ms, strict=True)
    ]


class LayerMove:
    """One rank's share of a repartition. All ranks of a pipeline must make the same calls in the
    same order.

    Args:
        ranks: Global ranks of the stages that have layers, first stage first.
        stage: This rank's stage.
        before: Number of layers on each stage before the move.
        after: Number of layers on each stage after the move.
        group: Process group used for sending. Default: the default group.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage: int,
        before: Sequence[int],
        after: Sequence[int],
        group: Any = None,
    ) -> None:
        self._ranks, self._stage, self._group = ranks, stage, group
        self._before, self._after = _owners(before), _owners(after)
        self.partition = tuple(after)

    def modules(self, modules: nn.ModuleDict, make: Callable[[int], nn.Module]) -> nn.ModuleDict:
        """Send and receive layers, and return this stage's layers after the move, by index.

        Args:
            modules: This stage's layers before the move, by index.
            make: Function that builds the layer with a given index before its weights are received.
        """
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
    """Return, for each layer, the stage that holds it."""
    ends = list(accumulate(partition))
    return [
        next(stage for stage, end in enumerate(ends) if layer < end) for layer in range(ends[-1])
    ]


def _release(module: nn.Module) -> None:
    """Free a layer's memory immediately. vLLM's parameters refer to their layer, so the layer's
    memory would otherwise be freed only by garbage collection.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        yield parameter.data
    yield from module.buffers()
