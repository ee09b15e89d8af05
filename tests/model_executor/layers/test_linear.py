# SPDX-License-Identifier: Apache-2.0
"""Tests of the transformers' linear layers, which derive from vLLM's: weight sharding, weight
loading and results.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from vllm.config import CompilationConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, checkpoint_slots
from vllm_omni.model_executor.layers.linear import linear
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    LinearPrecision,
    MergedLinear,
    QKVLinear,
    RowLinear,
    StackedLinear,
)
from vllm_omni.registration import use_quantization_kernel

IN, OUT, RANKS = 12, 8, 2
PRECISION = LinearPrecision()

Make = Callable[[ParallelContext], LinearBase]
LAYERS: dict[str, Make] = {
    "column": lambda parallel: ColumnLinear(IN, OUT, parallel, PRECISION, "layer"),
    "merged": lambda parallel: MergedLinear(
        IN, ("k", "v"), (OUT, OUT), parallel, PRECISION, "layer"
    ),
    "qkv": lambda parallel: QKVLinear(IN, 2, 4, 2, parallel, PRECISION, "layer"),
    "stacked": lambda parallel: StackedLinear(
        IN, (OUT // 2, OUT // 2), parallel, PRECISION, "layer"
    ),
    "row": lambda parallel: RowLinear(IN, OUT, parallel, PRECISION, "layer"),
}


def model(kind: str, parallel: ParallelContext, seed: int = 0) -> nn.ModuleDict:
    """Return a one-layer model loaded from a checkpoint. All ranks load the same checkpoint."""
    holder = nn.ModuleDict({"layer": LAYERS[kind](parallel)})
    generator = torch.Generator().manual_seed(seed)
    for slot in checkpoint_slots(holder).values():
        slot.load(torch.randn(slot.shape, generator=generator))
    return holder


def shards(kind: str) -> list[LinearBase]:
    return [model(kind, ParallelContext(rank, RANKS))["layer"] for rank in range(RANKS)]  # type: ignore[misc]


@pytest.mark.parametrize("kind", LAYERS)
def test_each_layer_chooses_its_fp8_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for FP8 weights is chosen for every layer, even for the merged layers, which skip
    some of vLLM's constructors.
    """
    layers: list[LinearBase] = []
    monkeypatch.setattr(linear, "choose_kernel", layers.append)
    layer = LAYERS[kind](ParallelContext())
    assert layers == [layer]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("column", {"layer.weight": (OUT, IN), "layer.bias": (OUT,)}),
        ("row", {"layer.weight": (OUT, IN), "layer.bias": (OUT,)}),
        (
            "qkv",
            {
                **{f"{name}.weight": (rows, IN) for name, rows in (("q", 8), ("k", 4), ("v", 4))},
                **{f"{name}.bias": (rows,) for name, rows in (("q", 8), ("k", 4), ("v", 4))},
            },
        ),
        ("stacked", {"layer.weight": (OUT, IN), "layer.bias": (OUT,)}),
        (
            "merged",
            {"k.weight": (OUT, IN), "k.bias": (OUT,), "v.weight": (OUT, IN), "v.bias": (OUT,)},
        ),
    ],
)
@pytest.mark.parametrize("size", [1, RANKS])
def test_a_layer_expects_whole_tensors_under_the_checkpoints_names(
    kind: str, names: dict[str, tuple[int, ...]], size: int
) -> None:
    holder = nn.ModuleDict({"layer": LAYERS[kind](ParallelContext(size - 1, size))})
    assert {
        name.lstrip("."): slot.shape for name, slot in checkpoint_slots(holder).items()
    } == names


def test_ranks_of_a_column_layer_compute_its_channels_in_order() -> None:
    x = torch.randn(3, IN)
    whole = model("column", ParallelContext())["layer"](x)
    torch.testing.assert_close(torch.cat([layer(x) for layer in shards("column")], dim=-1), whole)


@pytest.mark.parametrize("kind", ["merged", "stacked"])
def test_ranks_of_merged_layers_hold_a_part_of_each(kind: str) -> None:
    x = torch.randn(3, IN)
    k, v = model(kind, ParallelContext())["layer"](x).chunk(2, dim=-1)
    parts = [layer(x).chunk(2, dim=-1) for layer in shards(kind)]
    torch.testing.assert_close(torch.cat([part[0] for part in parts], dim=-1), k)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], dim=-1), v)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_their_query_heads_and_the_matching_key_value_heads(ranks: int) -> None:
    """When four ranks shard four query heads and two key/value heads, each key/value head is held
    by two ranks.
    """
    x = torch.randn(3, IN)
    q, k, v = model("qkv", ParallelContext())["layer"](x).split([8, 4, 4], dim=-1)
    kv_rows = 4 // min(ranks, 2)
    for rank in range(ranks):
        own = model("qkv", ParallelContext(rank, ranks))["layer"](x).split(
            [8 // ranks, kv_rows, kv_rows], dim=-1
        )
        kv_rank = rank * 2 // max(2, ranks)
        torch.testing.assert_close(own[0], q.chunk(ranks, dim=-1)[rank])
        torch.testing.assert_close(own[1], k.split(kv_rows, dim=-1)[kv_rank])
        torch.testing.assert_close(own[2], v.split(kv_rows, dim=-1)[kv_rank])


def test_ranks_of_a_row_layer_add_the_bias_once() -> None:
    x = torch.randn(3, IN)
    whole = model("row", ParallelContext())["layer"]
    rows = shards("row")
    assert all(isinstance(row, RowLinear) for row in rows)
    total = sum(row.own_part(part) for row, part in zip(rows, x.chunk(RANKS, dim=-1), strict=True))  # type: ignore[operator]
    torch.testing.assert_close(total + whole.bias, whole(x))
    assert all(torch.equal(row.bias, whole.bias) for row in rows)


@pytest.mark.parametrize("kind", LAYERS)
def test_vllm_does_not_repack_loaded_weights(kind: str) -> None:
    """On a CPU, vLLM's own method would repack the weights. Repacked weights could neither move to
    another stage nor be reloaded.
    """
    holder = model(kind, ParallelContext())
    layer = holder["layer"]
    weight, before = layer.weight, layer.weight.clone()
    process_weights_after_loading(holder, ModelConfig.__new__(ModelConfig), torch.device("cpu"))
    assert layer.weight is weight and torch.equal(weight, before)
    x = torch.randn(3, IN)
    assert torch.equal(layer(x), functional.linear(x, before, layer.bias))
    model_again = model(kind, ParallelContext(), seed=1)
    for name, slot in checkpoint_slots(holder).items():
        slot.load(checkpoint_slots(model_again)[name].target)
    assert torch.equal(layer(x), model_again["layer"](x))


def test_a_tensor_of_another_shape_is_refused() -> None:
    """A tensor with the wrong shape is rejected before vLLM's loader runs, because that loader
    silently slices larger tensors.
    """
    for kind in LAYERS:
        holder = nn.ModuleDict({"layer": LAYERS[kind](ParallelContext())})
        slot = next(iter(checkpoint_slots(holder).values()))
        with pytest.raises(ValueError, match=r"has shape \(9, 13\), expected \(8, 12\)"):
            slot.load(torch.zeros(OUT + 1, IN + 1))


@pytest.mark.parametrize(
    ("requested", "used"), [([], True), (["-quant_fp8"], False), (["+quant_fp8"], True)]
)
def test_inputs_are_quantized_by_vllms_kernel(requested: list[str], used: bool) -> None:
    """Unless the user configures otherwise, vLLM's kernel quantizes the inputs. By default, with
    compilation enabled, vLLM would instead compile its PyTorch version for every layer.
    """
    compilation = CompilationConfig(custom_ops=["none", *requested])
    use_quantization_kernel(compilation.custom_ops)
    with set_current_vllm_config(VllmConfig(compilation_config=compilation)):
        assert QuantFP8.enabled() == used
