# SPDX-License-Identifier: Apache-2.0
"""Tests of which linear layers `--quantization` applies to, and of strict loading of these
layers.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_omni.model_executor.checkpoint.loading import load_strict
from vllm_omni.model_executor.layers.collectives.parallel import CheckpointSlot, ShardedModule
from vllm_omni.model_executor.layers.linear.linear import (
    LinearPrecision,
    PlainLinearMethod,
    check_quantization,
)
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.causal_wan.transformer import CausalWanTransformer
from vllm_omni.model_executor.models.lance.config import LanceConfig
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer
from vllm_omni.model_executor.models.wan2_2.config import Wan22Config
from vllm_omni.model_executor.models.wan2_2.transformer import Wan22Transformer

pytestmark = pytest.mark.usefixtures("uncompiled")


class Quantized(PlainLinearMethod):
    """Stands in for a vLLM quantization method that would need a GPU."""


class Quantization(LinearPrecision):
    """Stands in for a vLLM quantization config and records the layers that a method is requested
    for.

    Args:
        ignored: Name of a layer that the config ignores.
    """

    def __init__(self, ignored: str = "") -> None:
        super().__init__()
        self.requested: list[str] = []
        self.ignored = ignored

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase:
        self.requested.append(prefix)
        return PlainLinearMethod() if prefix == self.ignored else Quantized()


WAN_BLOCK = {
    "self_attn.qkv",
    "self_attn.o",
    "cross_attn.q",
    "cross_attn.kv",
    "cross_attn.o",
    "ffn.0",
    "ffn.2",
}
LANCE_LAYER = {
    f"{expert}.{name}" for expert in ("und", "gen") for name in ("qkv", "out", "gate_up", "down")
}

NETWORKS: dict[str, tuple[Callable[[Quantization], nn.Module], str, set[str], int]] = {
    "lingbot_world": (
        lambda q: LingBotTransformer(LingBotWorldConfig(num_layers=2), quantization=q),
        "transformer.blocks.",
        WAN_BLOCK,
        2,
    ),
    "causal_wan": (
        lambda q: CausalWanTransformer(CausalWanConfig(num_layers=2), quantization=q),
        "transformer.blocks.",
        WAN_BLOCK,
        2,
    ),
    "wan2_2": (
        lambda q: Wan22Transformer(
            Wan22Config(num_layers=2), quantization=q, prefix="transformer_2"
        ),
        "transformer_2.blocks.",
        WAN_BLOCK,
        2,
    ),
    "lance": (
        lambda q: LanceNetwork(LanceConfig(num_layers=2), quantization=q),
        "language_model.model.layers.",
        LANCE_LAYER,
        2,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_only_linear_layers_of_blocks_are_quantized(name: str) -> None:
    """Only the linear layers in blocks are quantized. Embedding, time, text, modulation and head
    layers are not. A method is requested once for each linear layer in a block, under its name in
    the pipeline. Camera layers stay unquantized, because this config does not quantize while
    loading.
    """
    make, prefix, layers, blocks = NETWORKS[name]
    quantization = Quantization()
    with torch.device("meta"):
        network = make(quantization)
    expected = {f"{prefix}{block}.{layer}" for block in range(blocks) for layer in layers}
    assert Counter(quantization.requested) == Counter(expected)
    methods = {
        m.prefix: type(m.quant_method) for m in network.modules() if isinstance(m, LinearBase)
    }
    assert {layer for layer, method in methods.items() if method is Quantized} == expected
    retained = {
        re.sub(r"blocks\.\d+", "blocks.N", layer)
        for layer, method in methods.items()
        if method is PlainLinearMethod
    }
    camera = ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")
    assert retained == (
        {f"{prefix}N.{layer}" for layer in camera} if name == "lingbot_world" else set()
    )


def test_ignored_layers_stay_as_loaded() -> None:
    quantization = Quantization(ignored="transformer.blocks.1.ffn.0")
    with torch.device("meta"):
        network = CausalWanTransformer(CausalWanConfig(num_layers=2), quantization=quantization)
    plain = [
        m.prefix
        for m in network.modules()
        if isinstance(m, LinearBase) and type(m.quant_method) is not Quantized
    ]
    assert plain == ["transformer.blocks.1.ffn.0"]


def test_a_network_without_quantizable_layers_is_refused() -> None:
    with pytest.raises(
        ValueError, match="--quantization fp8_per_channel: Linear has no layer for it; drop it"
    ):
        check_quantization(nn.Linear(2, 2), "fp8_per_channel")


class Late(ShardedModule):
    """A layer that creates its weight only after the complete weight has arrived, as vLLM's online
    quantization methods do.
    """

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield "weight", CheckpointSlot((2,), torch.empty(2, device="meta"), None, lambda full: None)


class Source:
    where = "a file"

    def __init__(self) -> None:
        self.shapes, self.dtypes = {"weight": (2,)}, {"weight": torch.float32}

    def read_tensors(self, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.tensor([1.0, torch.nan])


def test_nan_in_a_weight_that_will_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NaN or Inf in 1 .weight"):
        load_strict(Late(), Source(), {"weight": (2,)}, what="network")  # type: ignore[arg-type]
