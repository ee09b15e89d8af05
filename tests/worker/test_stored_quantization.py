# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with quantized stored weights, on a CPU: either vLLM's kernels compute with these
weights, or the weights are dequantized.

The model is Wan 2.2 with both experts, from tests/golden/quantized, in every format for which vLLM
has a CPU kernel. On a CPU, formats that only GPUs support are refused, as tested in
tests/model_executor/test_checkpoint_quantization.py. benchmarks/fp8.py runs those formats.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.quantized import QUANTIZED, with_transformer, write_pipeline
from helpers.snapshot_steps import Worker

pytestmark = pytest.mark.usefixtures("uncompiled")

MakeRunner = Callable[..., Any]
FP8_ERROR, INT8_ERROR, FP4_ERROR = 0.15, 0.05, 0.4
"""Allowed relative errors in a video's latents after four steps. The measured errors are 0.064,
0.017 and 0.26.
"""
VIDEO: dict[str, Any] = {
    "one_shot": True,
    "prompt": "a field",
    "output": "latents",
    "seed": 1,
    "num_frames": 5,
    "num_inference_steps": 4,
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("wan2_2"))


def video(runner: Any, session: str = "a") -> torch.Tensor:
    return Worker(runner).chunk(session, **VIDEO)["latents"].float()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def exact(make_runner: MakeRunner, pipeline: Path) -> torch.Tensor:
    return video(make_runner(pipeline, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("llmcompressor_fp8", FP8_ERROR),
        # Without VNNI, a CPU saturates sums of int8 products at 16 bits. The measured error is then
        # 0.065.
        ("llmcompressor_int8", INT8_ERROR if torch.cpu._is_vnni_supported() else 0.15),
    ],
)
def test_stored_weights_are_computed_by_kernels_of_vllm(
    make_runner: MakeRunner,
    pipeline: Path,
    exact: torch.Tensor,
    tmp_path: Path,
    name: str,
    allowed: float,
) -> None:
    """A video generated with quantized weights is close to but different from one generated with
    bf16 weights. The video generated with quantized weights stays the same after a reload.

    vLLM's int8 kernel for AMX retains the original weights. vLLM's oneDNN kernel frees them, so a
    reload with that kernel is refused and changes nothing.
    """
    runner = make_runner(with_transformer(pipeline, QUANTIZED / name, tmp_path), dtype="bfloat16")
    found = video(runner)
    assert 1e-3 < error(found, exact) < allowed
    reloads = name != "llmcompressor_int8" or torch.cpu._is_amx_tile_supported()
    refused = pytest.raises(Exception, match="start the server anew")
    with torch.inference_mode(), nullcontext() if reloads else refused:
        runner.reload_weights()
    assert torch.equal(video(runner, "b"), found)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("modelopt_fp8", FP8_ERROR), ("modelopt_nvfp4", FP4_ERROR), ("torchao_int8", INT8_ERROR)],
)
@pytest.mark.nightly
def test_stored_weights_without_a_kernel_are_dequantized(
    make_runner: MakeRunner,
    pipeline: Path,
    exact: torch.Tensor,
    tmp_path: Path,
    name: str,
    allowed: float,
) -> None:
    path = with_transformer(pipeline, QUANTIZED / name, tmp_path)
    runner = make_runner(path, {"dequantize": True}, dtype="bfloat16")
    assert 1e-3 < error(video(runner), exact) < allowed
