# SPDX-License-Identifier: Apache-2.0
"""The AR worker on CUDA with features that each require a separate engine, such as images and
adapters.
"""

from pathlib import Path

import pytest
from ar_cuda import (
    FINAL,
    LIMIT_S,
    ON_CUDA,
    PROMPTS,
    SHARED_GPU,
    Engine,
    Reference,
    write_adapter,
)
from ar_engine import params
from helpers.ar_compatibility import feature
from vllm.lora.request import LoRARequest

from vllm_omni.hidden_states import hidden_states_of

pytestmark = [*ON_CUDA, pytest.mark.nightly, pytest.mark.timeout(LIMIT_S)]


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
