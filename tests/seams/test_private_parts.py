# SPDX-License-Identifier: Apache-2.0
"""Private torch and vLLM functions and attributes that this package uses behave as required.

A failing test names the code that uses the private function or attribute.
"""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerTensorOnlineLinearMethod,
    OnlineLinearBase,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

from vllm_omni.entrypoints.engine.output_threads import OUTPUT_THREAD
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.linear.int8_weights import _DONE, Int8WeightMethod
from vllm_omni.model_executor.layers.linear.linear import ColumnLinear, LinearPrecision

IN, OUT = 8, 6
USER = "vllm_omni.model_executor.layers.linear.int8_weights uses it"


class EverythingInt8(LinearPrecision):
    def get_quant_method(self, layer: nn.Module, prefix: str) -> Int8WeightMethod:
        return Int8WeightMethod()


@pytest.fixture
def vllm_config(single_rank: None) -> Iterator[VllmConfig]:
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)  # type: ignore[assignment]
    with set_current_vllm_config(config):
        yield config


def load(layer: ColumnLinear, weight: torch.Tensor) -> None:
    layer.weight.weight_loader(layer.weight, weight)


def test_torch_fuses_addmm_and_gelu() -> None:
    """torch has a fused addmm and GELU that takes the bias, the input and the transposed weight as
    arguments.

    On a CPU, it applies the erf GELU, which differs from the tanh GELU by at most 5e-4.
    test_the_gelu_of_a_product_is_the_gelu_of_its_result tests CUDA.
    """
    user = "vllm_omni.model_executor.layers.linear.linear.gelu_of calls it"
    fused = getattr(torch, "_addmm_activation", None)
    assert fused is not None, f"torch {torch.__version__} has no _addmm_activation; {user}"
    arguments = {
        argument.name for argument in torch.ops.aten._addmm_activation.default._schema.arguments
    }
    assert {"self", "mat1", "mat2", "use_gelu"} <= arguments, (
        f"_addmm_activation takes {arguments}; {user}"
    )
    rows, weight, bias = (torch.randn(shape) for shape in ((3, IN), (OUT, IN), (OUT,)))
    wanted = functional.gelu(functional.linear(rows, weight, bias), approximate="tanh")
    difference = (fused(bias, rows, weight.t(), use_gelu=True) - wanted).abs().max()
    assert difference < 1e-3, f"_addmm_activation is {difference} off the GELU of the sum; {user}"


def test_online_quantization_of_vllm_uses_the_meta_device(
    vllm_config: VllmConfig,
) -> None:
    """In vLLM's online quantization, a weight stays on the meta device until its layer has been
    loaded completely.

    A quantization method reads the weight through `get_weight_for_quantization`.
    """
    assert OnlineLinearBase.uses_meta_device is True, f"OnlineLinearBase loads otherwise; {USER}"
    layer = ColumnLinear(IN, OUT, ParallelContext(), EverythingInt8(), "a", bias=False)
    assert layer.weight.is_meta, f"OnlineLinearBase.create_weights makes a weight at once; {USER}"
    assert (layer.input_size, layer.input_size_per_partition) == (IN, IN), (
        f"create_weights sets other sizes; {USER}"
    )
    plain = SimpleNamespace(weight=torch.ones(2))
    method = Int8WeightMethod()
    assert method.get_weight_for_quantization(plain) is plain.weight, (
        f"get_weight_for_quantization has changed; {USER}"
    )  # type: ignore[arg-type]


def test_vllm_marks_quantized_layers_and_clears_the_mark_on_reload(vllm_config: VllmConfig) -> None:
    """A layer is quantized when its last tensor is loaded. It is not quantized again when vLLM
    processes the whole model after loading.

    A reload quantizes the layer again.
    """
    theirs = Fp8PerTensorOnlineLinearMethod.process_weights_after_loading.__code__
    marks = {*theirs.co_names, *theirs.co_consts}
    assert _DONE in marks, f"vLLM marks quantized layers by another flag than {_DONE}; {USER}"

    layer = ColumnLinear(IN, OUT, ParallelContext(), EverythingInt8(), "a", bias=False)
    record_metadata_for_reloading(layer)
    first = torch.randn(OUT, IN, dtype=torch.bfloat16)
    load(layer, first)
    assert layer.weight.dtype == torch.int8, (
        f"vLLM does not round a layer when its last tensor is there; {USER}"
    )
    quantized, scale = layer.weight.clone(), layer.weight_scale.clone()
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.weight, quantized) and torch.equal(layer.weight_scale, scale), (
        f"a layer marked {_DONE} was quantized again; {USER}"
    )

    initialize_layerwise_reload(layer)
    load(layer, first * 4)
    finalize_layerwise_reload(layer, vllm_config.model_config)
    assert torch.equal(layer.weight, quantized) and torch.equal(layer.weight_scale, scale * 4), (
        f"a reload left the old weights: vLLM no longer removes {_DONE}; {USER}"
    )


def test_the_output_thread_of_vllm_has_its_name() -> None:
    user = "vllm_omni.entrypoints.engine.output_threads waits for it by that name"
    constants = inspect.unwrap(SyncMPClient.__init__).__code__.co_consts
    assert OUTPUT_THREAD in constants, f"SyncMPClient names its thread otherwise; {user}"


def test_hidden_states_of_vllm_are_a_file_of_fixed_layers() -> None:
    """vLLM's own hidden-states feature writes the hidden states of a fixed set of layers to a file.

    If vLLM's feature changes, reconsider docs/architecture/ar_path.md ("Why not
    `extract_hidden_states`").
    """
    connector = object.__new__(ExampleHiddenStatesConnector)
    connector._request_filenames, connector._pending_saves = {"a": "/tmp/a.safetensors"}, {}
    request = SimpleNamespace(
        request_id="a", kv_transfer_params=None, prompt_token_ids=[1, 2], all_token_ids=[1, 2, 3]
    )
    delays_free, parameters = connector.request_finished(request, [0])  # type: ignore[arg-type]
    assert delays_free and parameters == {"hidden_states_path": "/tmp/a.safetensors"}
    assert connector._pending_saves["a"].token_ids.tolist() == [1, 2], (
        "of the prompt, unless asked otherwise"
    )
    source = inspect.getsource(ExtractHiddenStatesProposer)
    assert '"eagle_aux_hidden_state_layer_ids"' in source, (
        "layers are the engine's, not a request's"
    )
    assert "self.num_speculative_tokens == 1" in source
