# SPDX-License-Identifier: Apache-2.0
"""Every disabled fast path reports which requirement is missing. These tests patch the environment
that the checks inspect, not the checks' return values.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm.triton_utils
from helpers.fake_hopper import fake_hopper
from helpers.logged import logged

from vllm_omni.model_executor.fast_paths import machine_paths
from vllm_omni.model_executor.layers import fast_path
from vllm_omni.model_executor.layers.attention.fp8_attention import cudnn_fp8_attention
from vllm_omni.model_executor.layers.fast_path import FastPath, joined, log_paths

FLASH_ATTENTION = "vllm.vllm_flash_attn.flash_attn_interface"
HOPPER = torch.device("cuda")


def of_machine() -> dict[str, FastPath]:
    return {path.name: path for path in machine_paths()}


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Simulate a vLLM build that includes FlashAttention 3, which runs on Hopper GPUs."""
    module: Any = ModuleType(FLASH_ATTENTION)
    module.fa_version_unsupported_reason = lambda version: None
    monkeypatch.setitem(sys.modules, FLASH_ATTENTION, module)
    return module


def test_a_hopper_gpu_with_all_packages_uses_every_fast_path(flash_attention: Any) -> None:
    with fake_hopper(with_packages=["cudnn", "triton"]) as patch:
        patch.setattr(vllm.triton_utils, "HAS_TRITON", True)
        patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        assert {name: str(path) for name, path in of_machine().items() if not path.is_on} == {}


def test_a_missing_cudnn_package_is_named_with_its_remedy() -> None:
    """A missing cuDNN package is reported with the command that installs it. vLLM's CUDA builds
    depend on the package, but a user can uninstall it.
    """
    with fake_hopper(with_packages=["cudnn"]):
        assert cudnn_fp8_attention(HOPPER).is_on
    with fake_hopper(without=["cudnn"]):
        path = cudnn_fp8_attention(HOPPER)
    assert (path.is_on, path.reason, path.remedy) == (
        False,
        "the package nvidia-cudnn-frontend is not installed",
        "pip install nvidia-cudnn-frontend",
    )


def test_a_missing_triton_turns_all_its_kernels_off() -> None:
    with fake_hopper(without=["triton"]):
        found = of_machine()
    for name in ("quantization_kernels", "pointwise_kernels", "fused_vae"):
        assert found[name].reason == "the package triton is not installed"


@pytest.mark.parametrize(
    ("machine", "name", "reason"),
    [
        ({"cuda": "12.8"}, "cublas_fp8", "torch is built for CUDA 12.8"),
        ({"capability": (8, 6)}, "cublas_fp8", "this GPU is sm_86, not sm_90"),
        ({"capability": (10, 0)}, "cudnn_fp8_attention", "this GPU is sm_100, not sm_90"),
        ({"capability": (10, 0)}, "int8_products", "this GPU is sm_100, not sm_90"),
        ({"capability": (8, 6)}, "quantization_kernels", "this GPU is sm_86, older than sm_89"),
    ],
)
def test_a_gpu_or_a_build_of_torch_that_lacks_support_is_named(
    machine: dict[str, Any], name: str, reason: str
) -> None:
    with fake_hopper(**machine):
        assert of_machine()[name].reason == reason


def test_the_reason_of_vllm_is_quoted(flash_attention: Any) -> None:
    """If FlashAttention 3 is unavailable, vLLM's reason is reported for two fast paths:
    FlashAttention 3 itself and cuDNN cross-attention.
    """
    flash_attention.fa_version_unsupported_reason = lambda version: f"FA{version} was not built"
    with fake_hopper():
        found = of_machine()
    assert found["flash_attention_3"].reason == "FA3 was not built"
    assert found["cudnn_cross_attention"].reason == "FA3 was not built"


def test_a_build_of_vllm_without_flash_attention_is_named() -> None:
    with fake_hopper() as patch:
        patch.setitem(sys.modules, FLASH_ATTENTION, None)
        path = of_machine()["flash_attention_3"]
    assert FLASH_ATTENTION in path.reason and path.remedy == "install a CUDA build of vLLM"


ON = FastPath("a", "slow")
OFF = FastPath("a", "slow", "it is missing", "pip install it")


@pytest.mark.parametrize("ranks", [[[ON], [OFF]], [[OFF], [ON]], [[], [OFF], [ON]]])
def test_a_path_that_is_off_on_one_rank_is_off(ranks: list[list[FastPath]]) -> None:
    """A fast path that is off on one rank is reported as off for all ranks, with that rank's
    reason. Ranks to which the path does not apply, such as a stage without a decoder, are ignored.
    """
    assert joined(ranks) == [OFF]


def test_the_log_has_one_line_per_path_that_is_off() -> None:
    """A fast path that is off is logged as a warning only if the user can turn it on."""
    paths = [FastPath("x", "slow"), FastPath("y", "slow"), OFF, FastPath("b", "slow", "unused")]
    with logged(fast_path.logger) as lines:
        log_paths(paths)
    missing = "fast path a: off, because it is missing; slow instead (pip install it)"
    assert lines == [
        "fast paths: x, y",
        missing,
        "fast path b: off, because unused; slow instead",
    ]
    with logged(fast_path.logger, 30) as warnings:
        log_paths(paths)
    assert warnings == [missing]
