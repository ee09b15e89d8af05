# SPDX-License-Identifier: Apache-2.0
"""Startup fails with a one-line error if an argument would have no effect on the worker.

tests/test_engine_arguments.py contains the complete list of these arguments.
"""

from pathlib import Path

import pytest
from helpers.quick_programs import run_python

from vllm_omni.model_executor.models.registry import get_family

LLM_START = """
import json, sys
from vllm import LLM
if __name__ == "__main__":
    LLM(**json.loads(sys.argv[1]))
"""
DIFFUSION = "the diffusion worker does not support --quantization awq: use fp8"


def start(*arguments: object, **variables: str) -> tuple[int, str]:
    """Run `python ARGUMENTS` until it exits by itself; return its exit status and its combined
    output.
    """
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_COLOR": "0", **variables}
    ended = run_python(*arguments, limit_s=240, environ=environ)
    return ended.returncode, ended.stdout + ended.stderr


def test_omni_ends_with_status_2_and_one_line(null_world: Path) -> None:
    """`vllm-omni serve` exits with status 2 and a one-line error instead of a traceback. It accepts
    `--ws websockets`, which selects another WebSocket library.
    """
    status, output = start(
        *(
            "-m",
            "vllm_omni.entrypoints.cli.main",
            "serve",
            null_world,
            "--port",
            "0",
        ),
        *("--ws", "websockets", "--quantization", "awq"),
    )
    assert status == 2, output
    assert (
        output.rstrip()
        .splitlines()[-1]
        .startswith(f"vllm-omni: error: {DIFFUSION}, fp8_per_channel")
    )


@pytest.mark.nightly
def test_plain_vllm_serve_is_refused_too(null_world: Path) -> None:
    """Plain `vllm serve` rejects the same arguments. This test passes all options explicitly, as
    printed by `--omni`.
    """
    status, output = start(
        *(
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            null_world,
            "--port",
            "0",
        ),
        *(
            "--config-format",
            "omni",
            "--worker-cls",
            "vllm_omni.worker.DiffusionGPUWorker",
            "--skip-tokenizer-init",
        ),
        *("--scheduler-cls", "vllm_omni.core.sched.StreamBatchScheduler", "--quantization", "awq"),
        VLLM_PLUGINS="vllm_omni",
    )
    assert status != 0 and DIFFUSION in output
    assert "EngineCore" not in output, "no engine process may start"


@pytest.mark.nightly
def test_an_offline_pipeline_is_refused(tmp_path: Path) -> None:
    """`LLM(...)` with the diffusers executor rejects `--enable-lora`, because adapters are
    configured in `omni.model.loras`.
    """
    family = get_family("diffusers_pipeline")
    family.make_tiny(tmp_path / "pipeline", 0, family.layouts[0])
    arguments = (
        f'{{"model": "{tmp_path / "pipeline"}", "config_format": "omni", "enable_lora": true}}'
    )
    status, output = start("-c", LLM_START, arguments)
    assert status != 0
    assert (
        "the diffusers executor does not support --enable-lora: list adapters in omni.model.loras"
        in output
    )


@pytest.mark.nightly
def test_the_ar_worker_refuses_pooling(tiny_language_model: Path) -> None:
    """The AR worker itself rejects pooling before it loads, because a stock model does not use this
    package's config hook.
    """
    arguments = (
        f'{{"model": "{tiny_language_model}", "runner": "pooling", "worker_cls": '
        '"vllm_omni.worker.ARGPUWorker", '
        '"dtype": "float32", "max_model_len": 128, "enforce_eager": true}'
    )
    status, output = start("-c", LLM_START, arguments)
    assert status != 0
    assert (
        "the AR worker does not support --runner pooling: use vLLM's own worker for pooling"
        in output
    )
