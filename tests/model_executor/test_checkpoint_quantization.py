# SPDX-License-Identifier: Apache-2.0
"""Tests of the quantization that a checkpoint describes, and of loading vLLM's quantized layers
from the checkpoint.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.quantized import QUANTIZED
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import get_quantization_config

from vllm_omni.config import OmniConfig
from vllm_omni.engine_arguments.refusals import check_quantization
from vllm_omni.model_executor.checkpoint.quantization import LAYERS_KEY, quantization_of
from vllm_omni.model_executor.checkpoint.tensor_files import read_json
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.layers.linear.linear import PlainLinearMethod
from vllm_omni.model_executor.layers.linear.stored_quantization import StoredQuantization
from vllm_omni.model_executor.models.wan.transformer.weights import TRANSFORMER_RULES
from vllm_omni.model_executor.models.wan2_2.config import Wan22Config
from vllm_omni.model_executor.models.wan2_2.transformer import Wan22Transformer
from vllm_omni.model_executor.models.wan2_2.weights import load_transformer
from vllm_omni.testing.tiny.quantized import SIZES, draw, write_fp8_scaled

pytestmark = pytest.mark.usefixtures("uncompiled")

FILE = "diffusion_pytorch_model.safetensors"
BLOCK_LAYERS = 10
"""Number of linear layers in a block, as stored in the checkpoint."""


def described(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = quantization_of({"transformer": folder}, TRANSFORMER_RULES)
    return dict(found["quantization_config"])


def copied(name: str, out: Path, **config: Any) -> Path:
    """Copy a fixture and change values in its config.json. A value of None removes the key."""
    shutil.copytree(QUANTIZED / name, out, dirs_exist_ok=True)
    values = {**read_json(out / "config.json"), **config}
    (out / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )
    return out


@pytest.mark.parametrize(
    ("name", "method", "more"),
    [
        ("modelopt_fp8", "modelopt", 5),  # the embeddings are quantized too
        ("modelopt_nvfp4", "modelopt", 5),
        ("llmcompressor_fp8", "compressed-tensors", 0),
        ("llmcompressor_int8", "compressed-tensors", 0),
        ("llmcompressor_nvfp4", "compressed-tensors", 0),
    ],
)
def test_a_description_becomes_vllms_with_translated_layer_names(
    name: str, method: str, more: int
) -> None:
    found = described(QUANTIZED / name)
    assert found["quant_method"] == method and found["ignore"] == []
    layers = found[LAYERS_KEY]
    assert len(layers) == SIZES["num_layers"] * BLOCK_LAYERS + more
    assert {"transformer.blocks.0.self_attn.q", "transformer.blocks.1.ffn.2"} <= set(layers)


def test_modelopts_file_applies_if_the_config_has_no_description(tmp_path: Path) -> None:
    folder = copied("modelopt_nvfp4", tmp_path / "transformer", quantization_config=None)
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps(
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "NVFP4", "group_size": 16},
            }
        )
    )
    assert described(folder) == described(QUANTIZED / "modelopt_nvfp4")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    model = WanTransformer3DModel(**SIZES)
    draw(model)
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_the_communitys_fp8_file_is_detected(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "fp8").mkdir()
    write_fp8_scaled(plain / FILE, tmp_path / "fp8" / FILE)
    found = described(tmp_path / "fp8")
    assert found["quant_method"] == "fp8" and found["activation_scheme"] == "dynamic"
    assert len(found[LAYERS_KEY]) == SIZES["num_layers"] * BLOCK_LAYERS


def test_plain_and_torchao_weights_have_no_description(plain: Path) -> None:
    assert quantization_of({"transformer": plain}) == {}
    assert quantization_of({"transformer": QUANTIZED / "torchao_int8"}) == {}


def test_without_weights_every_layer_is_quantized(tmp_path: Path) -> None:
    """If there are no weights, every layer counts as quantized, because `--load-format dummy` reads
    only the config.
    """
    (tmp_path / "config.json").write_bytes(
        (QUANTIZED / "llmcompressor_fp8" / "config.json").read_bytes()
    )
    assert described(tmp_path)[LAYERS_KEY] is None


def test_unknown_methods_are_refused(tmp_path: Path) -> None:
    folder = copied("modelopt_fp8", tmp_path, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(
        ValueError,
        match="quantized by 'bitsandbytes'; served are modelopt, compressed-tensors, fp8, torchao",
    ):
        described(folder)
    folder = copied(
        "modelopt_fp8",
        tmp_path,
        quantization_config={"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    )
    with pytest.raises(ValueError, match="ModelOpt's 'W4A8_AWQ'; served are FP8,"):
        described(folder)


def test_several_schemes_in_one_checkpoint_are_refused(tmp_path: Path) -> None:
    values = read_json(QUANTIZED / "llmcompressor_fp8" / "config.json")["quantization_config"]
    (group,) = values["config_groups"].values()
    folder = copied(
        "llmcompressor_fp8",
        tmp_path,
        quantization_config={**values, "config_groups": {"a": group, "b": group}},
    )
    with pytest.raises(ValueError, match="2 config_groups; served is one scheme"):
        described(folder)


def test_experts_that_are_quantized_differently_are_refused(plain: Path) -> None:
    with pytest.raises(
        ValueError, match=r"in different ways: transformer .*modelopt.*, transformer_2 not at all"
    ):
        quantization_of(
            {"transformer": QUANTIZED / "modelopt_fp8", "transformer_2": plain}, TRANSFORMER_RULES
        )


def test_a_description_without_quantized_tensors_is_refused(plain: Path) -> None:
    values = read_json(QUANTIZED / "modelopt_fp8" / "config.json")
    (plain / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match="describes weights quantized by modelopt, and all its tensors are plain"
    ):
        described(plain)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("modelopt_fp8", "ModelOpt's FP8"),
        ("modelopt_nvfp4", "NVFP4"),
        ("llmcompressor_nvfp4", "NVFP4"),
    ],
)
def test_formats_without_a_cpu_kernel_are_refused_only_on_a_cpu(name: str, reason: str) -> None:
    stored = described(QUANTIZED / name)
    with pytest.raises(
        ValueError,
        match=f"stored in {reason}, for which vLLM has no kernel on a CPU; set omni.dequantize",
    ):
        check_quantization(
            stored["quant_method"], OmniConfig(), has_config=False, cpu=True, stored=stored
        )
    check_quantization(
        stored["quant_method"], OmniConfig(), has_config=False, cpu=False, stored=stored
    )


def test_a_stored_method_is_refused_for_plain_weights() -> None:
    with pytest.raises(
        ValueError,
        match="--quantization modelopt is for checkpoints that are stored quantized",
    ):
        check_quantization("modelopt", OmniConfig(), has_config=False, cpu=False)


def network(folder: Path, quantization: StoredQuantization | None) -> Wan22Transformer:
    config = Wan22Config.from_checkpoint(read_json(folder / "config.json"))
    with default_dtype(torch.bfloat16):
        transformer = Wan22Transformer(config, quantization=quantization)
    load_transformer(transformer, folder, config)
    return transformer


def stored_quantization(folder: Path) -> StoredQuantization:
    values = described(folder)
    return StoredQuantization(
        get_quantization_config(values["quant_method"]).from_config(values), values[LAYERS_KEY]
    )


@pytest.fixture(scope="module")
def bf16(null_world: Path, single_rank: None) -> VllmConfig:
    """Return a vLLM config for a bf16 model. Quantization methods read the dtype of their inputs
    from this config.
    """
    args = EngineArgs(
        model=str(null_world), config_format="omni", skip_tokenizer_init=True, dtype="bfloat16"
    )
    return args.create_engine_config()


@pytest.mark.parametrize("name", ["llmcompressor_fp8", "llmcompressor_int8"])
def test_vllms_layers_compute_with_the_stored_values(bf16: VllmConfig, name: str) -> None:
    """Each layer's output is compared with the output for dequantized weights, so quantizing the
    inputs is the only source of error.

    A CPU without VNNI adds int8 products in 16 bits and saturates large sums. The measured error is
    then 11 % of the norm of the layer's output.
    """
    folder = QUANTIZED / name
    allowed = 0.04 if name.endswith("fp8") or torch.cpu._is_vnni_supported() else 0.2
    with set_current_vllm_config(bf16):
        quantized, read_back = network(folder, stored_quantization(folder)), network(folder, None)
        expected = {
            name: layer
            for name, layer in read_back.named_modules()
            if isinstance(layer, LinearBase)
        }
        layers = {
            name: layer
            for name, layer in quantized.named_modules()
            if isinstance(layer, LinearBase)
        }
        assert len(layers) == 2 * 7 and not any(
            type(each.quant_method) is PlainLinearMethod for each in layers.values()
        )
        for each, layer in layers.items():
            with default_dtype(torch.bfloat16):
                layer.quant_method.process_weights_after_loading(layer)
            x = torch.randn(8, layer.input_size, dtype=torch.bfloat16)
            reference = expected[each](x).float()
            assert (layer(x).float() - reference).norm() < allowed * reference.norm(), each


def test_layers_stored_unquantized_stay_plain(bf16: VllmConfig) -> None:
    values = described(QUANTIZED / "llmcompressor_fp8")
    config = get_quantization_config(values["quant_method"]).from_config(values)
    stored = StoredQuantization(
        config, [name for name in values[LAYERS_KEY] if ".ffn." not in name]
    )
    with set_current_vllm_config(bf16), torch.device("meta"):
        transformer = Wan22Transformer(
            Wan22Config.from_checkpoint(dict(SIZES)), quantization=stored
        )
    retained = {
        m.prefix
        for m in transformer.modules()
        if isinstance(m, LinearBase) and type(m.quant_method) is PlainLinearMethod
    }
    assert retained == {
        f"transformer.blocks.{block}.ffn.{layer}" for block in (0, 1) for layer in (0, 2)
    }


def test_a_partly_quantized_merged_layer_is_refused(bf16: VllmConfig) -> None:
    values = described(QUANTIZED / "llmcompressor_fp8")
    config = get_quantization_config(values["quant_method"]).from_config(values)
    stored = StoredQuantization(
        config, [name for name in values[LAYERS_KEY] if not name.endswith("self_attn.q")]
    )
    with (
        set_current_vllm_config(VllmConfig()),
        torch.device("meta"),
        pytest.raises(ValueError, match="are one product here"),
    ):
        Wan22Transformer(Wan22Config.from_checkpoint(dict(SIZES)), quantization=stored)
