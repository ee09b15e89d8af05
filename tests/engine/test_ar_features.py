# SPDX-License-Identifier: Apache-2.0
"""The AR worker with vLLM features that each require a separate engine.

With every feature, the hidden states match those of Hugging Face Transformers.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ar_eagle import BLOCKS, DRAFTER_LAYERS, write_eagle3_drafter
from ar_engine import PROMPTS, Reference, assert_hidden_states, params, running_llm, states_of
from ar_torchrun import run_two_ranks
from helpers.ar_compatibility import feature
from helpers.programs import run_program
from vllm.lora.request import LoRARequest

from vllm_omni.hidden_states import hidden_states_of

pytestmark = pytest.mark.nightly

LIMIT_S = 400
"""Timeout in seconds for a program that runs two engines."""
REPEATING = "the sea the sea the sea the sea the sea the sea"


def check_all_modes(
    llm: Any, reference: Reference, layers: tuple[int, ...] = (-1,), **fields: Any
) -> None:
    """Check a batch of requests with and without hidden states: the text does not depend on whether
    a request asks for hidden states, and the hidden states are correct.
    """
    modes: list[Any] = ["all", None, "generated", "last"]
    prompts = [PROMPTS[0], PROMPTS[0], REPEATING, PROMPTS[2]]
    plain = llm.generate(prompts, [params(None, **fields) for _ in modes], use_tqdm=False)
    outputs = llm.generate(
        prompts, [params(mode, layers, **fields) for mode in modes], use_tqdm=False
    )
    for mode, before, output in zip(modes, plain, outputs, strict=True):
        assert output.outputs[0].token_ids == before.outputs[0].token_ids
        if mode is None:
            assert hidden_states_of(output) is None
        else:
            assert_hidden_states(output, reference, mode, layers)


@feature("speculative decoding (ngram)")
def test_rejected_drafts_have_no_hidden_states(tiny_language_model: Path) -> None:
    """Every accepted token has one hidden state, whereas a rejected draft has none.

    The model is random, so some drafts are accepted and most are rejected.
    """
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    reference = Reference(tiny_language_model)
    with running_llm(
        tiny_language_model,
        {"hidden_state_layers": [2]},
        speculative_config=speculative,
        disable_log_stats=False,
    ) as llm:
        check_all_modes(llm, reference, (2, -1), max_tokens=40)
        drafted = {
            m.name: m.value
            for m in llm.get_metrics()
            if m.name.startswith("vllm:spec_decode_num") and hasattr(m, "value")
        }
        assert (
            drafted["vllm:spec_decode_num_draft_tokens"]
            > drafted["vllm:spec_decode_num_accepted_tokens"]
            > 0
        )


@feature("speculative decoding (EAGLE-3, its layers)")
def test_a_drafter_and_requests_read_the_same_layers(tmp_path: Path) -> None:
    """The hidden states of accepted tokens are correct, even for layers that the drafter also
    reads.

    Most tokens that a random drafter proposes are rejected.
    """
    from vllm_omni.testing.tiny.language_model import write_tiny_language_model

    model = write_tiny_language_model(tmp_path / "model", num_hidden_layers=BLOCKS)
    drafter = write_eagle3_drafter(model, tmp_path / "drafter")
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 2}
    with running_llm(
        model,
        {"hidden_state_layers": list(DRAFTER_LAYERS)},
        speculative_config=speculative,
        disable_log_stats=False,
    ) as llm:
        check_all_modes(llm, Reference(model), (2, 5, -1), max_tokens=40)
        drafted = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        assert drafted["vllm:spec_decode_num_draft_tokens"] > 40


@feature("tensor parallelism (TP 2)")
def test_two_tensor_ranks(tiny_language_model: Path) -> None:
    """With two tensor-parallel ranks, only the rank that returns outputs copies hidden states."""
    with running_llm(
        tiny_language_model, {"hidden_state_layers": [0, 2]}, tensor_parallel_size=2
    ) as llm:
        check_all_modes(llm, Reference(tiny_language_model), (0, 2, -1))
        stats = llm.collective_rpc("hidden_states_stats")
        assert [rank["bytes_copied"] > 0 for rank in stats] == [True, False]


@feature("pipeline parallelism (PP 2)")
@pytest.mark.parametrize("layers", [(), (0, 1, 3)], ids=["last layer", "layers of both stages"])
def test_two_stages(tiny_language_model: Path, layers: tuple[int, ...]) -> None:
    """With two pipeline stages, the last stage returns the hidden states.

    The first stage sends the hidden states of its layers to the last stage as intermediate tensors.
    """
    with running_llm(
        tiny_language_model,
        {"hidden_state_layers": list(layers)},
        pipeline_parallel_size=2,
        max_num_batched_tokens=16,
    ) as llm:
        check_all_modes(llm, Reference(tiny_language_model), (*layers, -1))


@feature(
    "LoRA",
    note="on a CPU, stock vLLM needs `max_loras` above the adapters in use, see the test's control",
)
def test_hidden_states_include_the_adapter(tiny_language_model: Path, tmp_path: Path) -> None:
    """In a batch of requests with and without an adapter, the hidden states of each request match
    those of Hugging Face Transformers with the same adapter or none.
    """
    adapted = write_adapter(tiny_language_model, tmp_path)
    reference = Reference(tiny_language_model)
    with running_llm(tiny_language_model, {"hidden_state_layers": [2]}, **LORA, max_loras=2) as llm:
        outputs = llm.generate(
            [PROMPTS[0]] * 2,
            [params("all", (2, -1))] * 2,
            lora_request=[adapter(tmp_path), None],
            use_tqdm=False,
        )
        assert_hidden_states(outputs[0], adapted, layers=(2, -1))
        assert_hidden_states(outputs[1], reference, layers=(2, -1))
        assert not torch.allclose(
            states_of(outputs[0])[-1][5], states_of(outputs[1])[-1][5], atol=1e-2
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a fault of vLLM's CPU kernels")
def test_stock_vllm_gives_a_cpu_request_without_adapter_the_last_slot(
    tiny_language_model: Path, tmp_path: Path
) -> None:
    """Stock vLLM on a CPU applies the adapter in the last slot to a request without an adapter.

    A request without an adapter has slot -1, which `vllm/lora/ops/torch_ops` uses as an index. This
    is why the test above leaves one adapter slot free. If this test fails, vLLM has fixed the bug:
    remove `max_loras` from the test above, and delete the feature's note.
    """
    write_adapter(tiny_language_model, tmp_path)
    free_slot, no_free_slot = (
        stock_logprobs(tiny_language_model, adapter(tmp_path), max_loras=max_loras)
        for max_loras in (2, 1)
    )
    assert torch.allclose(free_slot["mixed"], free_slot["alone"], atol=1e-4)
    assert not torch.allclose(no_free_slot["mixed"], no_free_slot["alone"], atol=1e-2)


LORA = {"enable_lora": True, "max_lora_rank": 8}


def write_adapter(model: Path, folder: Path) -> Reference:
    """Save a random adapter; return a reference computed by the Hugging Face Transformers model
    with that adapter.
    """
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(folder)
    adapted = Reference(model)
    adapted.model = PeftModel.from_pretrained(adapted.model, folder).merge_and_unload()
    return adapted


def adapter(folder: Path) -> LoRARequest:
    return LoRARequest("adapter", 1, str(folder))


def stock_logprobs(model: Path, request: LoRARequest, max_loras: int) -> dict[str, torch.Tensor]:
    """Return the log-probabilities that stock vLLM computes for a prompt without an adapter.

    The prompt runs once by itself, and once in a batch with a request that uses an adapter.
    """
    sampling = params(None, prompt_logprobs=1)
    with running_llm(
        model, worker_cls="auto", scheduler_cls=None, **LORA, max_loras=max_loras
    ) as llm:
        alone = llm.generate([PROMPTS[0]], [sampling], use_tqdm=False)[0]
        mixed = llm.generate(
            [PROMPTS[0]] * 2, [sampling] * 2, lora_request=[request, None], use_tqdm=False
        )[1]

    def of_prompt(output: Any) -> torch.Tensor:
        tokens = output.prompt_token_ids[1:]
        return torch.tensor(
            [
                at[token].logprob
                for at, token in zip(output.prompt_logprobs[1:], tokens, strict=True)
            ]
        )

    return {"alone": of_prompt(alone), "mixed": of_prompt(mixed)}


@feature(
    "data parallelism (DP 2)", note="dense model: engines independent, no padding between them"
)
def test_two_engines(tiny_language_model: Path, tmp_path: Path) -> None:
    """With two data-parallel engines, requests on both engines receive their hidden states."""
    script = tmp_path / "two_engines.py"
    script.write_text(DP_SCRIPT)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": str(Path(__file__).parent)}
    assert "STATES RIGHT" in run_program(
        [sys.executable, str(script), str(tiny_language_model)], environment, LIMIT_S
    )


@feature("external launcher (torchrun, TP 2)")
def test_torchrun_tensor_parallel(tiny_language_model: Path, tmp_path: Path) -> None:
    """Under torchrun with tensor parallelism, every rank runs its own engine and returns the same
    hidden states.
    """
    torchrun(tiny_language_model, tmp_path, "tensor_parallel_size")


@feature(
    "external launcher (torchrun, PP 2)", note="stock V2 has none: vLLM takes V1 there by itself"
)
def test_torchrun_pipeline_parallel(tiny_language_model: Path, tmp_path: Path) -> None:
    """Under torchrun with pipeline parallelism, the last stage broadcasts hidden states to the
    first stage, which also runs a scheduler.
    """
    torchrun(tiny_language_model, tmp_path, "pipeline_parallel_size")


@feature("worker without the scheduler")
def test_the_worker_brings_its_scheduler(tiny_language_model: Path) -> None:
    """The worker selects its scheduler, so hidden states are returned even if `scheduler_cls` is
    not set. The text equals that of a request without hidden states.
    """
    with running_llm(tiny_language_model, scheduler_cls=None) as llm:
        outputs = llm.generate([PROMPTS[0]] * 2, [params("all"), params(None)], use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
        assert hidden_states_of(outputs[0]) is not None and hidden_states_of(outputs[1]) is None
        assert llm.collective_rpc("hidden_states_stats")[0]["delivers"] is True


@feature("scheduler without the worker")
def test_without_the_worker_requests_get_their_text(tiny_language_model: Path) -> None:
    with running_llm(tiny_language_model, worker_cls="auto") as llm:
        output = llm.generate(PROMPTS[:1], params("all"), use_tqdm=False)[0]
        assert output.outputs[0].finish_reason == "length" and hidden_states_of(output) is None


@feature("torch.compile")
def test_a_compiled_model(tiny_language_model: Path) -> None:
    """The hidden states of retained layers are outputs of the compiled graph. vLLM compiles models
    on a CPU too, unless `--enforce-eager` is set.
    """
    with running_llm(tiny_language_model, {"hidden_state_layers": [2]}, enforce_eager=False) as llm:
        check_all_modes(llm, Reference(tiny_language_model), (2, -1))


@feature("M-RoPE and multimodal inputs (Qwen2-VL)")
def test_images(tmp_path: Path) -> None:
    """For a tiny Qwen2-VL, hidden states of image placeholders and of text match those of Hugging
    Face Transformers.
    """
    from ar_vision import check_image_request, write_tiny_qwen2_vl

    model = write_tiny_qwen2_vl(tmp_path / "qwen2_vl")
    check_image_request(model)


def torchrun(model: Path, tmp_path: Path, parallel: str) -> None:
    run_two_ranks(
        TORCHRUN_SCRIPT, tmp_path, [str(model), parallel], LIMIT_S, VLLM_CPU_OMP_THREADS_BIND="0|1"
    )


TORCHRUN_SCRIPT = """
import sys
from pathlib import Path
from ar_engine import PROMPTS, Reference, assert_hidden_states, params, running_llm
from ar_torchrun import report_success, step
from helpers.programs import limited_rank
from vllm_omni.hidden_states import hidden_states_of

if __name__ == "__main__":
    limited_rank()
    step("imports")
    model, parallel = Path(sys.argv[1]), sys.argv[2]
    with running_llm(model, distributed_executor_backend="external_launcher", seed=0, **{parallel: 2}) as llm:
        step("start")
        asked = [params("all"), params("generated"), params(None)]
        outputs = llm.generate([*PROMPTS[:2], PROMPTS[0]], asked, use_tqdm=False)
        step("texts")
        reference = Reference(model)
        assert_hidden_states(outputs[0], reference)
        assert_hidden_states(outputs[1], reference, "generated")
        assert hidden_states_of(outputs[2]) is None
        report_success()
"""  # noqa: E501

DP_SCRIPT = """
import asyncio, sys
from pathlib import Path
from ar_engine import PROMPTS, SCHEDULER, WORKER, Reference, assert_hidden_states, params
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

async def main(model):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), worker_cls=WORKER, scheduler_cls=SCHEDULER,
        dtype="float32", max_model_len=256, enforce_eager=True, data_parallel_size=2))
    async def one(prompt, rank):
        sampling = params("all", output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in engine.generate(prompt, sampling, f"{prompt}-{rank}", data_parallel_rank=rank):
            last = output
        return last
    outputs = await asyncio.gather(*(one(prompt, rank) for prompt in PROMPTS for rank in (0, 1)))
    engine.shutdown()
    reference = Reference(model)
    for output in outputs:
        assert_hidden_states(output, reference)
    print("STATES RIGHT", flush=True)

if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
"""  # noqa: E501
