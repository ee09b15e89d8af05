# SPDX-License-Identifier: Apache-2.0
"""`LayerOffloader` stores layers in host memory without changing any bit of the results. It meets
its memory budget and spreads the offloaded layers evenly.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.unreachable_weights import offloaded_out_of_reach
from helpers.wan22_driver import load_model, make_video
from torch import nn
from vllm.model_executor.offloader import set_offloader

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.linear.linear import ColumnLinear, LinearPrecision
from vllm_omni.model_executor.layers.offload import LayerOffloader, offloader_for, spread

CPU = torch.device("cpu")
ALL = 1 << 40
pytestmark = pytest.mark.usefixtures("no_offloader_left")


@pytest.fixture(scope="module")
def t2v(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("wan2_2", "t2v")


def layers(count: int, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    made: list[nn.Module] = [
        ColumnLinear(16, 16, ParallelContext(), LinearPrecision(), f"layer{index}")
        for index in range(count)
    ]
    for layer in made:
        for parameter in layer.parameters():
            parameter.data.normal_()
    return made


def offloaded(*networks: list[nn.Module], budget: int = ALL) -> LayerOffloader:
    offloader = LayerOffloader(budget, CPU)
    for network in networks:
        assert offloader.wrap_modules(layer for layer in network) == network
    offloader.post_init()
    return offloader


@pytest.mark.parametrize(
    ("gibibytes", "stage", "offloads"), [(0, 0, False), (1, 0, True), (1, 1, False)]
)
def test_ranks_that_hold_layers_have_an_offloader(
    gibibytes: float, stage: int, offloads: bool
) -> None:
    """If the user requests offloading, each rank that holds layers has an offloader. A stage that
    only decodes has none.
    """
    config: Any = SimpleNamespace(
        offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=gibibytes)),
        load_config=SimpleNamespace(load_format="auto"),
    )
    position = ParallelContext(stage=stage, num_stages=1, vae_stage=True)
    assert (offloader_for(config, CPU, position) is not None) == offloads


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_two_experts_in_host_memory_make_the_same_bits(t2v: Path, share: float) -> None:
    """Two experts produce bit-identical latents whether or not they are offloaded to host memory.
    The second of two requests has a new prompt, so cross-attention keys and values are recomputed
    between the requests.
    """
    plain = load_model(t2v)
    expected = [
        make_video(plain, prompt=prompt, seed=3, output="latents")[1]["latents"]
        for prompt in ("a", "b")
    ]
    total = sum(
        p.nbytes
        for name, p in plain.experts.named_parameters()
        if ".blocks." in name and p.dim() == 2
    )
    offloader = LayerOffloader(int(share * total), CPU)
    set_offloader(offloader)
    model = load_model(t2v)
    offloader.post_init()
    assert 0.5 * share * total < offloader.host_bytes
    for prompt, latents in zip(("a", "b"), expected, strict=True):
        assert torch.equal(
            make_video(model, prompt=prompt, seed=3, output="latents")[1]["latents"], latents
        )


def test_no_layer_of_wan_runs_before_its_weights_are_fetched(t2v: Path) -> None:
    expected = make_video(load_model(t2v), output="latents")[1]["latents"]
    model = offloaded_out_of_reach(lambda: load_model(t2v))
    assert torch.equal(make_video(model, output="latents")[1]["latents"], expected)


def test_layers_in_any_order_use_their_own_weights() -> None:
    """Every layer runs with its own weights, in whatever order the layers run. The test repeats and
    changes the order, and runs more layers than there are slots.
    """
    plain, offloaded_layers = layers(9), layers(9)
    offloaded(offloaded_layers[:5], offloaded_layers[5:])
    x = torch.randn(3, 16)
    order = [*range(9), *range(9), 3, 3, 8, 0, 8, 0, *reversed(range(9)), *range(9), *range(9)]
    for index in order:
        assert torch.equal(offloaded_layers[index](x), plain[index](x)), index


def test_weights_are_prefetched() -> None:
    """When the second pass starts, the weights of the first four layers are already on the
    device.
    """
    offloaded_layers = layers(8)
    offloader = offloaded(offloaded_layers)
    x = torch.randn(1, 16)
    for layer in offloaded_layers:
        layer(x)
    offloaded_layers[0](x)
    held = {slot.layer.layer for slot in offloader._slots if slot.layer is not None}
    assert held == set(offloaded_layers[:4])


def test_new_weights_are_used_after_a_reload() -> None:
    """Layers use their new weights after a reload, whether the reload copies them in place on the
    host or assigns new tensors.
    """
    offloaded_layers, other = layers(6), layers(6, seed=1)
    offloader = offloaded(offloaded_layers)
    x = torch.randn(1, 16)
    for layer in offloaded_layers:
        layer(x)
    for index, (layer, new) in enumerate(zip(offloaded_layers, other, strict=True)):
        for parameter, source in zip(layer.parameters(), new.parameters(), strict=True):
            if index % 2:
                parameter.data = source.data.clone()
            else:
                parameter.data.copy_(source.data)
    offloader.post_init()
    assert all(
        torch.equal(layer(x), new(x)) for layer, new in zip(offloaded_layers, other, strict=True)
    )


def test_a_failed_layer_releases_its_slot() -> None:
    offloaded_layers, plain = layers(6), layers(6)
    offloaded(offloaded_layers)
    with pytest.raises(RuntimeError):
        offloaded_layers[0](torch.randn(1, 5))
    x = torch.randn(1, 16)
    assert all(
        torch.equal(layer(x), other(x))
        for layer, other in zip(offloaded_layers, plain, strict=True)
    )


@pytest.mark.parametrize(
    ("budget", "chosen"), [(0, 0), (10, 1), (50, 5), (95, 9), (100, 10), (1000, 10)]
)
def test_a_budget_is_met_and_spread_evenly(budget: int, chosen: int) -> None:
    """With ten layers of ten bytes each, the numbers of offloaded layers in the two halves of the
    network differ by at most one.
    """
    on_host = spread([10] * 10, budget)
    assert sum(on_host) == chosen
    assert abs(sum(on_host[:5]) - sum(on_host[5:])) <= 1


def test_strides_are_preserved() -> None:
    """Offloading preserves a weight's strides, because FP8 kernels require column-major weights."""
    (layer,) = layers(1)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.t().contiguous().t()
    before = weight.data.clone()
    offloaded([layer])
    assert weight.data.stride() == (1, 16) and torch.equal(weight.data, before)


@pytest.mark.parametrize(
    ("network", "budget", "line"),
    [
        ([], ALL, "has no layers for it"),
        (layers(2), 8, "leaves nothing on the host: its smallest layer takes"),
    ],
)
def test_a_budget_without_effect_is_refused(
    network: list[nn.Module], budget: int, line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        offloaded(network, budget=budget)
