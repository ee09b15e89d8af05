# SPDX-License-Identifier: Apache-2.0
"""With quantization, `--load-format dummy` starts without a weight file for the transformer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.quantized import QUANTIZED, with_transformer

from vllm_omni.model_executor.models.registry import get_family

pytestmark = pytest.mark.usefixtures("uncompiled")

LAYOUTS = {
    "lingbot_world": "original",
    "causal_wan": "original",
    "wan2_2": "t2v",
    "matrix_game": "original",
    "lance": "video",
}


@pytest.mark.parametrize(
    "family",
    [
        name if name == "wan2_2" else pytest.param(name, marks=pytest.mark.nightly)
        for name in LAYOUTS
    ],
)
def test_weights_are_generated_and_quantized(
    family: str, make_runner: Callable[..., Any], tmp_path: Path
) -> None:
    """Weights are generated and quantized. To check them, the runner's warm-up generates a chunk
    and requires finite latents.
    """
    get_family(family).make_tiny(tmp_path, 0, LAYOUTS[family])
    for file in tmp_path.rglob("*transformer*/*.safetensors"):
        file.unlink()
    runner = make_runner(tmp_path, dtype="bfloat16", load_format="dummy", quantization="fp8")
    assert runner.model_config.quantization == "fp8_per_channel" and runner.sessions.max_bytes > 0


@pytest.mark.parametrize(
    ("name", "dequantize"),
    [
        ("llmcompressor_fp8", False),
        *[
            pytest.param(
                name,
                name.startswith("modelopt") or name.endswith("nvfp4"),
                marks=pytest.mark.nightly,
            )
            for name in (
                "llmcompressor_int8",
                "llmcompressor_nvfp4",
                "modelopt_fp8",
                "modelopt_nvfp4",
                "torchao_fp8",
            )
        ],
    ],
)
def test_weights_of_a_stored_format_are_generated(
    name: str, dequantize: bool, make_runner: Callable[..., Any], tmp_path: Path
) -> None:
    """Dummy weights can be generated for every stored quantized format."""
    get_family("wan2_2").make_tiny(tmp_path / "plain", 0, "t2v")
    path = with_transformer(tmp_path / "plain", QUANTIZED / name, tmp_path)
    runner = make_runner(path, {"dequantize": dequantize}, dtype="bfloat16", load_format="dummy")
    assert runner.sessions.max_bytes > 0
