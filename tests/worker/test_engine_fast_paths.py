# SPDX-License-Identifier: Apache-2.0
"""The fast paths that a loaded model reports: those of its components and those that its options
select.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni.model_executor.fast_paths import engine_paths
from vllm_omni.model_executor.layers.fast_path import FastPath

MakeRunner = Callable[..., Any]


def paths_of(runner: Any) -> dict[str, FastPath]:
    found = engine_paths(runner.network, runner.vllm_config, torch.device("cpu"))
    assert len({path.name for path in found}) == len(found)
    return {path.name: path for path in found}


def test_parts_of_a_model_report_their_choices(make_runner: MakeRunner, causal_wan: Path) -> None:
    """A model's options, its autoencoder and its ranks each report their fast paths."""
    found = paths_of(make_runner(causal_wan, {"model": {"compile": False}}))
    assert found["compile"].reason == "omni.model.compile is false"
    for name in ("cuda_graphs", "cuda_graphs_of_text_encoder", "fused_vae", "pointwise_kernels"):
        assert found[name].reason == "there is no CUDA GPU"
    assert "sequence_parallel" in found["peer_memory"].reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "keys and values are not FP8 (--kv-cache-dtype)"), ({"kv_cache_dtype": "fp8"}, "GPU")],
)
def test_attention_over_fp8_needs_fp8_keys_and_values(
    make_runner: MakeRunner, causal_wan: Path, options: dict[str, str], reason: str
) -> None:
    """FP8 attention is reported as off, with the reason, if the keys and values are not FP8 or if
    the device does not support it.
    """
    assert reason in paths_of(make_runner(causal_wan, **options))["cudnn_fp8_attention"].reason


def test_layers_with_fp8_weights_name_the_kernel_of_vllm(
    make_runner: MakeRunner, causal_wan: Path
) -> None:
    """Layers with FP8 weights report the vLLM kernel that they use, which differs between CPUs and
    GPUs.
    """
    precision = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}
    plain = paths_of(make_runner(causal_wan))
    quantized = paths_of(make_runner(causal_wan, **precision))
    for name in ("cublas_fp8", "quantized_inputs"):
        assert plain[name].reason == "no layer has FP8 weights (--quantization)"
        assert quantized[name].reason.startswith("vLLM has chosen ")
