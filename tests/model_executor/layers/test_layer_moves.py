# SPDX-License-Identifier: Apache-2.0
"""Tests of partitioning layers by cost and of moving them between pipeline stages (gloo, one
process per stage).
"""

import itertools
from pathlib import Path

import pytest
import torch
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from torch import nn

from vllm_omni.model_executor.layers.layer_moves import (
    LayerMove,
    StageCost,
    balanced_partition,
    stage_costs,
)

LAYERS, STAGES = 7, 3
PARTITIONS = ([3, 2, 2], [1, 1, 5], [5, 1, 1], [2, 3, 2])


@pytest.mark.parametrize(
    ("fixed_ms", "expected"),
    [((0, 0, 0), [3, 2, 2]), ((0, 0, 20), [3, 3, 1]), ((25, 0, 25), [2, 4, 1])],
)
def test_a_partition_minimises_the_slowest_stage(
    fixed_ms: tuple[float, ...], expected: list[int]
) -> None:
    """The partition minimises the slowest stage's time. Every stage keeps at least one layer."""
    costs = [StageCost(10.0, ms) for ms in fixed_ms]

    def slowest(partition: tuple[int, ...]) -> float:
        return max(cost.total_ms(layers) for cost, layers in zip(costs, partition, strict=True))

    got = balanced_partition(costs, LAYERS)
    everything = [p for p in itertools.product(range(1, LAYERS), repeat=STAGES) if sum(p) == LAYERS]
    assert slowest(tuple(got)) == min(map(slowest, everything))
    assert got == expected


def test_work_of_a_stage_besides_its_layers_is_a_fixed_cost() -> None:
    """Two stages of 15 layers each are rebalanced to 21 and 9 layers, because the second stage has
    additional work. It runs a head for 5 ms per pass and decodes for 100 ms per chunk of 5 passes.
    """
    costs = stage_costs([30.0, 35.0], [15, 15], 5, [0.0, 100.0])
    assert costs == [StageCost(10.0, 0.0), StageCost(10.0, 125.0)]
    assert balanced_partition(costs, 30) == [21, 9]


class Layer(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        for parameter in self.parameters():
            parameter.data.fill_(value)
        self.register_buffer("scale", torch.full((2,), value))


def _move(stage: int, rendezvous: str) -> None:
    with process_group(stage, STAGES, rendezvous):

        def mine(partition: list[int]) -> range:
            start = sum(partition[:stage])
            return range(start, start + partition[stage])

        layers = nn.ModuleDict({str(layer): Layer(float(layer)) for layer in mine(PARTITIONS[0])})
        for before, after in itertools.pairwise(PARTITIONS):
            move = LayerMove(range(STAGES), stage, before, after)
            old = dict(layers)
            layers = move.modules(layers, lambda layer: Layer(-1.0))
            gone = [module for name, module in old.items() if name not in layers]
            assert not any(
                parameter.numel() for module in gone for parameter in module.parameters()
            )
            assert list(layers) == [str(layer) for layer in mine(after)]
            for layer in mine(after):
                assert all(
                    bool((tensor == layer).all())
                    for tensor in layers[str(layer)].state_dict().values()
                )


def test_moved_layers_keep_their_weights(tmp_path: Path) -> None:
    """Layers keep their weights when they move repeatedly, to neighbouring or more distant stages.
    The source stage frees a moved layer's memory immediately.
    """
    run_ranks(_move, (str(tmp_path / "rendezvous"),), STAGES)
