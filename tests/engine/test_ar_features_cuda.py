# SPDX-License-Identifier: Apache-2.0
"""The AR worker on CUDA with features that each require a separate engine, such as images, adapters
and several GPUs.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from ar_cuda import (
    FINAL,
    PROMPTS,
    SHARED_GPU,
    Engine,
    Reference,
    check_all_modes,
    write_adapter,
)
from ar_engine import params
from ar_torchrun import run_two_ranks
from helpers.ar_compatibility import feature
from vllm.lora.request import LoRARequest

from vllm_omni.hidden_states import hidden_states_of

TORCHRUN_LIMIT_S = 120
LIMIT_S = 300
"""Timeout in seconds for a test whose engine compiles its model."""

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.nightly,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@feature("M-RoPE and multimodal inputs (Qwen2-VL)", "V2")
def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a tiny Qwen2-VL in fp32, hidden states of image placeholders and of text match those of
    Hugging Face Transformers.
    """
    from ar_vision import check_image_request, write_tiny_qwen2_vl

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    # The tolerance is 1e-2, because attention kernels may multiply fp32 values in TF32 (10-bit
    # mantissa), and the values are of order 1.
    check_image_request(write_tiny_qwen2_vl(tmp_path / "qwen2_vl"), tolerance=1e-2, **SHARED_GPU)


@feature("worker without the scheduler", "V2")
def test_the_worker_brings_its_scheduler(cuda_language_model: Path) -> None:
    """The worker selects its scheduler, so hidden states are returned even if `scheduler_cls` is
    not set.
    """
    with Engine(cuda_language_model, "V2", scheduler_cls=None, enforce_eager=True) as running:
        requested, plain = running.run(
            *((PROMPTS[0], params(mode, output_kind=FINAL)) for mode in ("all", None))
        )
        assert len(requested[0].outputs[0].token_ids) == len(plain[0].outputs[0].token_ids) == 8
        assert hidden_states_of(requested[0]) is not None and hidden_states_of(plain[0]) is None
        assert running.stats()["delivers"] is True


@feature("scheduler without the worker", "V2")
def test_without_the_worker_requests_get_their_text(cuda_language_model: Path) -> None:
    with Engine(cuda_language_model, "V2", worker_cls="auto", enforce_eager=True) as running:
        [[output]] = running.run((PROMPTS[0], params("all", output_kind=FINAL)))
        assert output.outputs[0].finish_reason == "length" and hidden_states_of(output) is None


@feature("LoRA", "V2")
def test_hidden_states_include_the_adapter(
    cuda_language_model: Path, reference: Reference, tmp_path: Path
) -> None:
    """In a batch of requests with and without an adapter, the hidden states of each request match
    those of Hugging Face Transformers with the same adapter or none.
    """
    adapted = Reference(
        cuda_language_model, write_adapter(cuda_language_model, tmp_path / "adapter")
    )
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "enforce_eager": True}
    with Engine(cuda_language_model, "V2", **lora) as running:
        requested = params("all", (2, -1), max_tokens=8, output_kind=FINAL)
        [with_adapter], [without] = running.run(
            (PROMPTS[3], requested, request), (PROMPTS[3], requested)
        )
        adapted.check(with_adapter, layers=(2, -1))
        reference.check(without, layers=(2, -1))
        with pytest.raises(AssertionError, match="relative error"):
            reference.check(with_adapter, layers=(2, -1))


@pytest.mark.several_gpus
@two_gpus
@feature("tensor parallelism (TP 2)", "V2")
def test_two_tensor_ranks(cuda_language_model: Path, reference: Reference) -> None:
    """With two tensor-parallel ranks, only the rank that returns outputs copies hidden states."""
    with Engine(cuda_language_model, "V2", tensor_parallel_size=2) as running:
        check_all_modes(running, reference)
        ranks = running.loop.run_until_complete(
            running.engine.collective_rpc("hidden_states_stats")
        )
        assert [rank["bytes_copied"] > 0 for rank in ranks] == [True, False]


@pytest.mark.several_gpus
@two_gpus
@feature("pipeline parallelism (PP 2)", "V2")
def test_two_stages(cuda_language_model: Path, reference: Reference) -> None:
    """With two pipeline stages, the stage that runs layer 0 or 2 retains the hidden states of that
    layer.

    The first stage sends the hidden states of its layers to the last stage as intermediate tensors.
    """
    with Engine(cuda_language_model, "V2", pipeline_parallel_size=2) as running:
        check_all_modes(running, reference)


@pytest.mark.several_gpus
@two_gpus
@feature("data parallelism (DP 2)", "V2")
def test_two_engines(cuda_language_model: Path, reference: Reference) -> None:
    """With two data-parallel engines, requests on both engines receive their hidden states."""
    with Engine(cuda_language_model, "V2", data_parallel_size=2) as running:

        async def one(prompt: str, rank: int) -> Any:
            sampling = params("all", output_kind=FINAL)
            stream = running.engine.generate(
                prompt, sampling, f"{prompt[:3]}-{rank}", data_parallel_rank=rank
            )
            return [output async for output in stream][-1]

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(
                *(one(prompt, rank) for prompt in PROMPTS for rank in (0, 1))
            )

        for output in running.loop.run_until_complete(all_of_them()):
            reference.check(output)


@pytest.mark.several_gpus
@two_gpus
@feature("external launcher (torchrun, TP 2)", "V2")
def test_torchrun_tensor_parallel(cuda_language_model: Path, tmp_path: Path) -> None:
    """Under torchrun with tensor parallelism, every rank runs its own engine and returns the same
    hidden states.
    """
    torchrun(cuda_language_model, tmp_path, "tensor_parallel_size", "V2")


@pytest.mark.several_gpus
@two_gpus
def test_torchrun_tensor_parallel_on_v1(cuda_language_model: Path, tmp_path: Path) -> None:
    torchrun(cuda_language_model, tmp_path, "tensor_parallel_size", "V1")


@pytest.mark.several_gpus
@two_gpus
def test_torchrun_pipeline_parallel_on_v1(cuda_language_model: Path, tmp_path: Path) -> None:
    """Under torchrun with pipeline parallelism, the last stage broadcasts hidden states to the
    first stage over NCCL.

    Stock vLLM supports this only with its V1 model runner.
    """
    torchrun(cuda_language_model, tmp_path, "pipeline_parallel_size", "V1")


def torchrun(cuda_language_model: Path, tmp_path: Path, parallel: str, runner: str) -> None:
    use_v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0"}
    run_two_ranks(
        TORCHRUN_SCRIPT, tmp_path, [str(cuda_language_model), parallel], TORCHRUN_LIMIT_S, **use_v2
    )


TORCHRUN_SCRIPT = """
import sys
from pathlib import Path
from ar_cuda import PROMPTS, SHARED_GPU, Reference
from ar_engine import params, running_llm
from ar_torchrun import report_success, step
from helpers.programs import limited_rank
from vllm_omni.hidden_states import hidden_states_of

if __name__ == "__main__":
    limited_rank()
    step("imports")
    model, parallel = Path(sys.argv[1]), sys.argv[2]
    fields = {**SHARED_GPU, "dtype": "bfloat16", "distributed_executor_backend": "external_launcher"}
    with running_llm(model, {"hidden_state_layers": [2]}, seed=0, **fields, **{parallel: 2}) as llm:
        step("start")
        asked = [params("all", (2, -1)), params("generated"), params(None)]
        outputs = llm.generate([*PROMPTS[:2], PROMPTS[0]], asked, use_tqdm=False)
        step("texts")
        reference = Reference(model)
        reference.check(outputs[0], layers=(2, -1))
        reference.check(outputs[1], "generated")
        assert hidden_states_of(outputs[2]) is None
        report_success()
"""  # noqa: E501
