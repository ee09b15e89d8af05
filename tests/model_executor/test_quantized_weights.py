# SPDX-License-Identifier: Apache-2.0
"""Tests of strict loading of quantized weights: values, invalid scales, and layers of other ranks.

The tests read files in tests/golden/quantized, which ModelOpt, llmcompressor and torchao wrote.
They also write files in the Wan community's layout.
"""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from vllm_omni.model_executor.checkpoint.tensor_files import read_json
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, checkpoint_slots
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
from vllm_omni.model_executor.models.lingbot_world.checkpoint import hf_config as lingbot_hf_config
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer
from vllm_omni.model_executor.models.lingbot_world.weights import load_transformer as load_lingbot
from vllm_omni.model_executor.models.wan2_2.config import Wan22Config
from vllm_omni.model_executor.models.wan2_2.transformer import Wan22Transformer
from vllm_omni.model_executor.models.wan2_2.weights import load_transformer
from vllm_omni.testing.tiny.quantized import SIZES, draw, write_fp8_scaled

QUANTIZED = Path(__file__).parents[1] / "golden" / "quantized"
FILE = "diffusion_pytorch_model.safetensors"
FP8_ERROR, INT8_ERROR, FP4_ERROR = 0.035, 0.01, 0.12
"""Maximum relative error of a weight with random values. Half an e4m3 step is 1/32 of a value, and
half an e2m1 step is up to 1/6 of a value.
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that contains, unquantized and in diffusers' layout, the transformer that
    the libraries quantized.
    """
    out = tmp_path_factory.mktemp("plain")
    model = WanTransformer3DModel(**SIZES)
    draw(model)
    model.save_pretrained(out)
    return out


def load(folder: Path, parallel: ParallelContext | None = None) -> dict[str, torch.Tensor]:
    config = Wan22Config.from_checkpoint(read_json(folder / "config.json"))
    with default_dtype(torch.bfloat16):
        transformer = Wan22Transformer(config, parallel or ParallelContext())
    load_transformer(transformer, folder, config)
    return {name: parameter.float() for name, parameter in transformer.named_parameters()}


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(
        float((found[name] - value).norm() / value.norm()) for name, value in expected.items()
    )


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("modelopt_fp8", FP8_ERROR),
        ("modelopt_nvfp4", FP4_ERROR),
        ("llmcompressor_fp8", FP8_ERROR),
        ("llmcompressor_int8", INT8_ERROR),
        ("llmcompressor_nvfp4", FP4_ERROR),
        ("torchao_fp8", FP8_ERROR),
        ("torchao_int8", INT8_ERROR),
    ],
)
def test_plain_layers_load_dequantized_weights_of_each_library(
    plain: Path, name: str, allowed: float
) -> None:
    """Each weight is paired with its scale, whichever library wrote them. If the library quantized
    the embeddings, their scales are paired too.
    """
    error = largest_error(load(QUANTIZED / name), load(plain))
    assert allowed / 10 < error < allowed


@pytest.fixture
def community(plain: Path, tmp_path: Path) -> Path:
    """Write a file in the Wan community's FP8 layout, with ComfyUI's prefix."""
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    write_fp8_scaled(plain / FILE, tmp_path / FILE, prefix="model.diffusion_model.")
    return tmp_path


def test_the_communitys_fp8_files_are_read(plain: Path, community: Path) -> None:
    assert FP8_ERROR / 10 < largest_error(load(community), load(plain)) < FP8_ERROR


def test_a_lingbot_world_in_the_communitys_fp8_is_read(lingbot_world: Path, tmp_path: Path) -> None:
    """One file in the community's FP8 layout replaces the transformer's files. Camera layers are
    dequantized, because this package never quantizes them.
    """
    shutil.copytree(lingbot_world, tmp_path, dirs_exist_ok=True)
    folder = find_layout(tmp_path).transformer
    config = LingBotWorldConfig.from_checkpoint(find_layout(tmp_path).transformer_config())
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors*"):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        path.unlink()
    save_file(tensors, tmp_path / "plain.safetensors")
    write_fp8_scaled(
        tmp_path / "plain.safetensors", folder / "LingBot_fp8_e4m3fn_scaled.safetensors"
    )
    assert lingbot_hf_config(tmp_path)["quantization_config"]["quant_method"] == "fp8"
    transformer = LingBotTransformer(config)
    load_lingbot(transformer, folder, config)
    found = {name: slot.target for name, slot in checkpoint_slots(transformer).items()}
    assert (
        FP8_ERROR / 10
        < largest_error(found, {name: tensors[name].float() for name in found})
        < FP8_ERROR
    )


def test_a_stage_ignores_the_scales_of_other_stages(plain: Path, community: Path) -> None:
    """When a pipeline stage is loaded, other stages' scales are reported as neither missing nor
    unexpected.
    """
    second = ParallelContext(stage=1, num_stages=2)
    found, expected = load(community, second), load(plain, second)
    assert "blocks.1.ffn.0.weight" in found and "blocks.0.ffn.0.weight" not in found
    assert largest_error(found, expected) < FP8_ERROR


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors in a file, and remove tensors whose new value is None. In the names of
    `changes`, `__` stands for a dot.
    """
    tensors = load_file(folder / FILE)
    for name, value in changes.items():
        del tensors[full := "model.diffusion_model." + name.replace("__", ".")]
        if value is not None:
            tensors[full] = value
    save_file(tensors, folder / FILE, {"format": "pt"})


def test_missing_scales_are_refused_with_three_examples(community: Path) -> None:
    change(
        community,
        **{f"blocks__0__attn1__{name}__scale_weight": None for name in ("to_q", "to_k", "to_v")},
    )
    change(community, blocks__1__ffn__net__2__scale_weight=None)
    with pytest.raises(
        ValueError, match=r"missing: 4 \(blocks\.0\.self_attn\.\w\.weight_scale, .*, .*, \.\.\.\)"
    ) as refusal:
        load(community)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "scale_weight",
            torch.ones(3),
            r"misshapen: 1 \(blocks\.1\.ffn\.2\.weight_scale \(3,\) instead of \(\)\)",
        ),
        ("weight", torch.zeros(32, 64), r"unexpected: 1 \(blocks\.1\.ffn\.2\.weight_scale\)"),
        ("scale_weight", torch.tensor(torch.nan), r"NaN or Inf in 1 .*net\.2\.weight"),
    ],
    ids=["misshapen scale", "scale of a plain weight", "NaN"],
)
def test_invalid_scales_are_refused(
    community: Path, name: str, value: torch.Tensor, message: str
) -> None:
    change(community, **{f"blocks__1__ffn__net__2__{name}": value})
    with pytest.raises(ValueError, match=message):
        load(community)


def test_integers_without_a_scale_are_refused(plain: Path, tmp_path: Path) -> None:
    """An integer tensor without a scale, for example an int8 bias, is rejected."""
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    tensors = load_file(plain / FILE)
    tensors["blocks.0.attn1.to_q.bias"] = torch.ones(32, dtype=torch.int8)
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"of another dtype than this model: 1 \(blocks\.0\.attn1\.to_q\.bias is int8, not b",
    ):
        load(tmp_path)


def test_scales_per_block_and_per_channel_are_applied(plain: Path, tmp_path: Path) -> None:
    """Scales are applied per block, even if the 128x128 block is larger than the layer. A
    one-dimensional scale tensor is applied per channel.
    """
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    tensors = load_file(plain / FILE)
    for name, scale, shape in (
        ("blocks.0.ffn.net.0.proj", "weight_scale_inv", (1, 1)),
        ("blocks.0.ffn.net.2", "weight_scale", (32,)),
    ):
        tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] * 64).to(torch.float8_e4m3fn)
        tensors[f"{name}.{scale}"] = torch.full(shape, 1 / 64)
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    assert largest_error(load(tmp_path), load(plain)) < FP8_ERROR
