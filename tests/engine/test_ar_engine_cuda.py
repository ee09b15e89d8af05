# SPDX-License-Identifier: Apache-2.0
"""The AR worker on CUDA: both runner generations, async scheduling, CUDA graphs, speculative decoding.

bf16 rounds after every operation, and how far that carries rows away grows with depth: transformers' own bf16 rows of
this tiny model are up to 13 % off its fp32 rows. So the yardstick is the fp32 forward, and bf16 rows may be at most 1.5
times as far from it as transformers' bf16 rows are; rows of other tokens would be many times as far. An engine in fp32
is compared directly.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ar_compatibility import feature
from ar_engine import SCHEDULER, WORKER, params
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_omni.hidden_states import concat, hidden_states_of
from vllm_omni.outputs import RequestFailed

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = ["the red bird sings in the big tree", "a small blue house", "sea", "the road is grey " * 12]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_omni.model_executor.tiny_language_model import write_tiny_language_model

    return write_tiny_language_model(
        tmp_path_factory.mktemp("cuda_language_model"),
        dtype="bfloat16",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


class Engine:
    """AsyncLLM with async scheduling, chunked prefill, prefix caching; `runner` is V1 or V2."""

    def __init__(self, model: Path, runner: str, **engine_args: Any) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
        self.loop = asyncio.new_event_loop()
        self.numbers = iter(range(10**6))
        self.engine = self.loop.run_until_complete(self._start(model, engine_args))

    async def _start(self, model: Path, engine_args: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        fields: dict[str, Any] = {
            "worker_cls": WORKER,
            "scheduler_cls": SCHEDULER,
            "max_model_len": 1024,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.2,
            "additional_config": {"omni": {"hidden_state_layers": [0, 2]}},
        }
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **{**fields, **engine_args}))

    def run(self, *requests: tuple[str, SamplingParams]) -> list[list[Any]]:
        async def stream(prompt: str, sampling: SamplingParams) -> list[Any]:
            return [out async for out in self.engine.generate(prompt, sampling, f"r{next(self.numbers)}")]

        async def together() -> Any:
            return await asyncio.gather(*(stream(*request) for request in requests))

        return self.loop.run_until_complete(together())

    def stats(self) -> dict[str, Any]:
        return self.loop.run_until_complete(self.engine.collective_rpc("hidden_states_stats"))[0]

    def stop(self) -> None:
        self.engine.shutdown()
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)


@pytest.fixture(scope="module", params=["V2", "V1"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    running = Engine(model, request.param)
    running.runner = request.param  # type: ignore[attr-defined]
    yield running
    running.stop()


class Reference:
    """What transformers computes for the same tokens, in fp32 and in bf16."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.exact, self.rounded = (
            AutoModelForCausalLM.from_pretrained(model, dtype=dtype).cuda().eval()
            for dtype in (torch.float32, torch.bfloat16)
        )

    def states(self, model: Any, token_ids: list[int], layer: int) -> torch.Tensor:
        with torch.no_grad():
            output = model(torch.tensor([token_ids]).cuda(), output_hidden_states=True)
        return output.hidden_states[layer][0].float().cpu()

    def check(self, output: Any, mode: str = "all", layers: tuple[int, ...] = (-1,)) -> None:
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        num_prompt = len(output.prompt_token_ids)
        states = hidden_states_of(output)
        assert states is not None, "no rows arrived"
        first = {"all": 0, "generated": num_prompt, "last": len(token_ids) - 2}[mode]
        assert states.positions.tolist() == list(range(first, len(token_ids) - 1))
        assert states.token_ids.tolist() == token_ids[first:-1]
        for layer in layers:
            want = self.states(self.exact, token_ids[:-1], layer)
            rounding = float((self.states(self.rounded, token_ids[:-1], layer) - want).norm() / want.norm())
            error = float((states[layer].float() - want[first:]).norm() / want[first:].norm())
            allowed = 1e-3 if states[layer].dtype == torch.float32 else max(1.5 * rounding, 1e-6)
            assert error <= allowed, f"layer {layer}: relative error {error:.4f}, allowed {allowed:.4f}"


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@feature("async scheduling", "V2")
def test_rows_arrive_with_the_chosen_runner(engine: Engine, reference: Reference) -> None:
    """Rows of mixed requests in one batch equal transformers', on the runner generation that was asked for."""
    stats = engine.stats()
    assert stats["delivers"] and ("V2" in stats["runner"]) == (engine.runner == "V2")  # type: ignore[attr-defined]
    assert engine.engine.vllm_config.scheduler_config.async_scheduling
    modes = ["all", "generated", "last", "all"]
    layers = [(-1,), (2, -1), (-1,), (0, 2, -1)]
    final = RequestOutputKind.FINAL_ONLY
    asked = [params(m, k, max_tokens=12, output_kind=final) for m, k in zip(modes, layers, strict=True)]
    plain = [params(None, max_tokens=12, output_kind=final) for _ in PROMPTS]
    outputs = engine.run(*zip(PROMPTS * 2, [*asked, *plain], strict=True))
    for [output], mode, wanted in zip(outputs[:4], modes, layers, strict=True):
        reference.check(output, mode, wanted)
    assert [hidden_states_of(out[-1]) for out in outputs[4:]] == [None] * 4


@feature("streaming", "V2")
def test_deltas_join_to_the_whole(engine: Engine, reference: Reference) -> None:
    [outputs] = engine.run((PROMPTS[0], params("all", max_tokens=24, output_kind=RequestOutputKind.DELTA)))
    joined = concat([hidden_states_of(output) for output in outputs])
    assert joined is not None and joined.positions.tolist() == list(range(len(PROMPTS[0]) + 23))


@feature("chunked prefill", "V2")
@feature("prefix caching", "V2")
def test_cached_and_chunked_prompts_are_complete(engine: Engine, reference: Reference) -> None:
    """204 tokens in chunks of 64, twice: `all` reads no cache, `generated` does."""
    final = RequestOutputKind.FINAL_ONLY
    for mode in ("all", "all", "generated"):
        [[output]] = engine.run((PROMPTS[3], params(mode, max_tokens=6, output_kind=final)))
        assert bool(output.num_cached_tokens) == (mode == "generated")
        reference.check(output, mode)


@feature("grammar masks (structured outputs)", "V2")
def test_a_grammar_is_kept(engine: Engine, reference: Reference) -> None:
    grammar = {"structured_outputs": StructuredOutputsParams(regex="(yes|no) (red|blue)"), "ignore_eos": False}
    [[output]] = engine.run((PROMPTS[0], params("all", output_kind=RequestOutputKind.FINAL_ONLY, **grammar)))
    assert output.outputs[0].text in ("yes red", "yes blue", "no red", "no blue")
    reference.check(output)


@feature("bytes copied = bytes asked for", "V2")
def test_only_asked_rows_are_copied(engine: Engine) -> None:
    """One step ahead of the results: an async engine may compute one token that nobody gets, at most one row each."""
    before = engine.stats()["bytes_copied"]
    final = RequestOutputKind.FINAL_ONLY
    engine.run((PROMPTS[1], params(None, max_tokens=10, output_kind=final)))
    assert engine.stats()["bytes_copied"] == before
    engine.run((PROMPTS[1], params("all", max_tokens=10, output_kind=final)))
    rows, rest = divmod(engine.stats()["bytes_copied"] - before, 256 * 2)
    assert rest == 0 and 18 + 9 <= rows <= 18 + 10


@feature("wrong requests", "V2")
def test_a_wrong_request_costs_only_itself(engine: Engine, reference: Reference) -> None:
    final = RequestOutputKind.FINAL_ONLY
    bad, good = engine.run(
        (PROMPTS[0], params("all", (1,), output_kind=final)), (PROMPTS[0], params("all", output_kind=final))
    )
    with pytest.raises(RequestFailed, match="hidden_state_layers"):
        hidden_states_of(bad[-1])
    reference.check(good[-1])


@feature("speculative decoding (ngram)", "V2")
@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_rejected_drafts_have_no_row(model: Path, reference: Reference, runner: str) -> None:
    """ngram drafts on the GPU, async: accepted rows only, equal to transformers'."""
    speculative = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    running = Engine(model, runner, speculative_config=speculative)
    try:
        final = RequestOutputKind.FINAL_ONLY
        for mode in ("all", "generated", "last"):
            [[output]] = running.run((PROMPTS[3], params(mode, max_tokens=40, output_kind=final)))
            reference.check(output, mode)
    finally:
        running.stop()


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_rows_in_fp32_are_transformers_rows(model: Path, reference: Reference, runner: str) -> None:
    """Without rounding in the way: prompt and generated rows of two layers, in chunks, to 1e-3 of their size."""
    running = Engine(model, runner, dtype="float32")
    try:
        final = RequestOutputKind.FINAL_ONLY
        asked = params("all", (2, -1), max_tokens=12, output_kind=final)
        for [output] in running.run((PROMPTS[0], asked), (PROMPTS[3], asked)):
            reference.check(output, layers=(2, -1))
    finally:
        running.stop()
