# SPDX-License-Identifier: Apache-2.0
"""On each rank, adapters are sharded like the rank's weights and applied before results are summed
across ranks.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, checkpoint_slots
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    LinearPrecision,
    QKVLinear,
    RowLinear,
)
from vllm_omni.model_executor.layers.lora.active import ActiveAdapter, using
from vllm_omni.model_executor.layers.lora.adapter import AdapterWeights, LowRank
from vllm_omni.model_executor.layers.lora.sites import AdaptedLayers, AdaptedMethod, layers_of
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.lance.checkpoint import hf_config, lance_config
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork
from vllm_omni.model_executor.models.lance.weights import adapter_target
from vllm_omni.testing.tiny.lance import make_tiny

SHAPES = {
    "block.q.weight": (8, 6),
    "block.k.weight": (8, 6),
    "block.v.weight": (8, 6),
    "block.up.weight": (12, 6),
    "block.up.bias": (12,),
    "block.down.weight": (6, 12),
    "block.down.bias": (6,),
    "out.weight": (3, 6),
    "out.bias": (3,),
}
IN_USE = [ActiveAdapter(slot=1, layout=1, version=1, scale=1.0)]


class Network(nn.Module):
    """One rank's shard of a network with one layer of each kind."""

    def __init__(self, parallel: ParallelContext) -> None:
        super().__init__()
        plain = LinearPrecision()
        self.block: Any = nn.Module()
        self.block.qkv = QKVLinear(6, 2, 4, 4, parallel, plain, "block.qkv", bias=False)
        self.block.up = ColumnLinear(6, 12, parallel, plain, "block.up")
        self.block.down = RowLinear(12, 6, parallel, plain, "block.down")
        self.out = nn.Linear(6, 3)
        for parameter in self.parameters():
            parameter.data.normal_()
        self.requires_grad_(False)


def build(parallel: ParallelContext) -> tuple[Network, AdaptedLayers]:
    """Return a network and its layers, with adapter support attached to the layers."""
    torch.manual_seed(0)
    network = Network(parallel)
    layers = AdaptedLayers(AdapterTarget(network, SHAPES), 2, 4, torch.float32, torch.ones(2))
    layers.attach_adapters()
    return network, layers


def weights() -> AdapterWeights:
    generator = torch.Generator().manual_seed(1)
    matrices = {}
    for name, shape in SHAPES.items():
        if len(shape) == 2:
            module, (outputs, inputs) = name.removesuffix(".weight"), shape
            bias = torch.randn(outputs, generator=generator) if f"{module}.bias" in SHAPES else None
            down, up = (
                torch.randn(3, inputs, generator=generator),
                torch.randn(outputs, 3, generator=generator),
            )
            matrices["net", module] = LowRank(down, up, bias)
    return AdapterWeights(matrices, {}, digest="")


def changes(network: Network, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the change that the adapter makes to a layer's output on this rank."""
    layer = getattr(network.block, name)
    run = layer.own_part if name == "down" else layer
    with using(IN_USE):
        adapted = run(x)
    difference: torch.Tensor = adapted - run(x)
    return difference


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_an_adapter_add_up_to_the_whole(size: int) -> None:
    """The shards of an adapted layer add up to the whole layer: columns are concatenated, rows are
    summed across ranks, and the bias is added once.
    """
    generator = torch.Generator().manual_seed(2)
    x, hidden = torch.randn(5, 6, generator=generator), torch.randn(5, 12, generator=generator)
    whole, layers = build(ParallelContext())
    layers.fill(1, "net", weights())
    expected = {
        name: changes(whole, name, hidden if name == "down" else x)
        for name in ("qkv", "up", "down")
    }
    found: dict[str, list[torch.Tensor]] = {name: [] for name in expected}
    for rank in range(size):
        part, own = build(ParallelContext(rank, size))
        own.fill(1, "net", weights())
        share = hidden[:, rank * 12 // size : (rank + 1) * 12 // size]
        for name in found:
            found[name].append(changes(part, name, share if name == "down" else x))
    thirds = zip(*(change.chunk(3, dim=-1) for change in found["qkv"]), strict=True)
    together = {
        "qkv": torch.cat([torch.cat(parts, dim=-1) for parts in thirds], dim=-1),
        "up": torch.cat(found["up"], dim=-1),
        "down": torch.stack(found["down"]).sum(0),
    }
    for name, change in expected.items():
        assert change.abs().max() > 0.1
        torch.testing.assert_close(together[name], change, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_adapter_parts_match_the_checkpoint_slots(size: int, tmp_path: Path) -> None:
    """When there are more ranks than key/value heads, several ranks load the adapter shard of the
    same head.
    """
    make_tiny(tmp_path, 0, "image")
    config = lance_config(hf_config(tmp_path)["lance"])
    for rank in range(size):
        network = LanceNetwork(config, ParallelContext(rank, size))
        slots, target = checkpoint_slots(network), adapter_target(network, config)
        seen = set()
        for _, parts in layers_of(target):
            for part in parts:
                slot = slots[f"{part.name}.weight"]
                dim, start = slot.part or (0, 0)
                position = (part.rows, part.columns)[dim]
                assert (position.start, len(position)) == (start, slot.target.shape[dim]), part.name
                seen.add(part.name)
        assert set(target.matrices()) <= seen


def test_without_an_adapter_a_layer_is_unchanged() -> None:
    """Layers with adapter support attached but no adapter produce the same results as plain layers,
    bit for bit. Detaching the adapter support restores each layer's own method.
    """
    network, layers = build(ParallelContext())
    x = torch.randn(4, 6)
    layers.detach()
    before, method = network.block.up(x), network.block.up.quant_method
    layers.attach_adapters()
    layers.fill(0, "net", weights())
    assert isinstance(network.block.up.quant_method, AdaptedMethod)
    assert torch.equal(network.block.up(x), before)
    with using(IN_USE):
        assert torch.equal(network.block.up(x), before), "an empty slot"
    layers.detach()
    assert network.block.up.quant_method is method and not network.out._forward_hooks


def test_refilling_a_slot_leaves_no_trace() -> None:
    """When a smaller adapter replaces a larger one in the same slot, none of the larger adapter's
    values remain.
    """
    network, layers = build(ParallelContext())
    x, large = torch.randn(4, 6), weights()
    up = replace(large.matrices["net", "block.up"], bias=None)
    assert up.down is not None and up.up is not None
    expected = network.block.up(x) + x @ up.down.T @ up.up.T
    plain = network.out(x)
    layers.fill(1, "net", large)
    layers.fill(1, "net", AdapterWeights({("net", "block.up"): up}, {}, digest=""))
    with using(IN_USE):
        torch.testing.assert_close(network.block.up(x), expected)
        assert torch.equal(network.out(x), plain)
