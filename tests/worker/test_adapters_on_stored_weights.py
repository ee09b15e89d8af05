# SPDX-License-Identifier: Apache-2.0
"""Tests of LoRA adapters for checkpoints whose stored weights are quantized.

The adapter's product is added to vLLM's quantized product, or the adapter is applied to dequantized
weights. The model is Wan 2.2, with both experts from tests/golden/quantized. In these tests,
formats that a CPU cannot run are dequantized.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers import lora_files as files
from helpers.quantized import QUANTIZED, with_transformer, write_pipeline
from helpers.snapshot_steps import Worker
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from vllm_omni.inputs import Lora
from vllm_omni.testing.tiny.quantized import SIZES, write_fp8_scaled

pytestmark = pytest.mark.usefixtures("uncompiled")

FILE = "diffusion_pytorch_model.safetensors"
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
INK = [Lora(name="ink")]
FORMATS: dict[str, tuple[bool, float]] = {
    "llmcompressor_fp8": (False, 0.2),
    "llmcompressor_int8": (False, 0.2),
    "community": (True, 0.2),
    "modelopt_fp8": (True, 0.2),
    "llmcompressor_nvfp4": (True, 0.6),
    "modelopt_nvfp4": (True, 0.6),
    "torchao_fp8": (False, 0.2),
    "torchao_int8": (False, 0.2),
}
"""For each format, the value of `omni.dequantize` and the allowed relative difference in an
adapter's effect.

Measured differences are 0.03 to 0.16, and 0.47 for ModelOpt's NVFP4. They arise because quantizing
the network also changes the adapter's effect.
"""
EVERY_TIME = ("llmcompressor_fp8", "llmcompressor_int8", "community")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("wan2_2"))


@pytest.fixture(scope="module")
def adapter(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with an adapter for every linear layer in both experts' blocks, with diffusers'
    tensor names.
    """
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, module in WanTransformer3DModel(**SIZES).named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("blocks."):
            down, up = (files.RANK, module.in_features), (module.out_features, files.RANK)
            tensors[f"{name}.lora_A.weight"] = (
                torch.randn(down, generator=generator) / module.in_features**0.5
            )
            tensors[f"{name}.lora_B.weight"] = 0.4 * torch.randn(up, generator=generator)
    path = tmp_path_factory.mktemp("adapter") / "ink.safetensors"
    save_file(tensors, path)
    return path


def video(worker: Worker, session: str, lora: list[Lora] | None = None) -> torch.Tensor:
    fields: dict[str, Any] = {
        "one_shot": True,
        "prompt": "a field",
        "output": "latents",
        "seed": 1,
        "num_frames": 5,
    }
    return worker.chunk(session, num_inference_steps=4, lora=lora, **fields)["latents"].float()


def effect(
    make_runner: Callable[..., Any], path: Path, adapter: Path, omni: dict[str, Any]
) -> torch.Tensor:
    """Return the change that an adapter makes to a video's latents.

    The function also checks that, before and after the adapter is used, the latents are
    bit-identical to the unadapted checkpoint's latents.
    """
    base = video(Worker(make_runner(path, omni, dtype="bfloat16")), "a")
    worker = Worker(make_runner(path, omni, dtype="bfloat16", **LORA))
    assert worker.runner.add_lora(LoRARequest("ink", 1, str(adapter)))
    assert torch.equal(video(worker, "a"), base)
    ink = video(worker, "b", INK)
    assert torch.equal(video(worker, "c"), base)
    assert torch.equal(video(worker, "d", INK), ink)
    assert worker.runner.remove_lora(1) and torch.equal(video(worker, "e"), base)
    return ink - base


@pytest.fixture(scope="module")
def exact(make_runner: Callable[..., Any], pipeline: Path, adapter: Path) -> torch.Tensor:
    return effect(make_runner, pipeline, adapter, {})


def stored(pipeline: Path, name: str, folder: Path) -> Path:
    if name != "community":
        return with_transformer(pipeline, QUANTIZED / name, folder)
    copy = with_transformer(pipeline, pipeline / "transformer", folder)
    for expert in ("transformer", "transformer_2"):
        file = copy / expert / FILE
        write_fp8_scaled(file, copy / expert / "wan_fp8_e4m3fn_scaled.safetensors")
        file.unlink()
    return copy


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.nightly)
        for name in FORMATS
    ],
)
def test_adapters_on_stored_quantized_weights_have_the_effect_of_bf16_weights(
    name: str,
    make_runner: Callable[..., Any],
    pipeline: Path,
    adapter: Path,
    exact: torch.Tensor,
    tmp_path: Path,
) -> None:
    """An adapter's effect on stored quantized weights is similar to its effect on bf16 weights.
    `FORMATS` states the allowed differences.

    The adapter product is computed in bf16 and added to the product computed in the stored format.
    """
    dequantize, allowed = FORMATS[name]
    found = effect(
        make_runner, stored(pipeline, name, tmp_path), adapter, {"dequantize": dequantize}
    )
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < allowed
