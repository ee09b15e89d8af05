# SPDX-License-Identifier: Apache-2.0
"""The AR worker in a real engine returns the same text as stock vLLM, and hidden states that match
those of Hugging Face Transformers.

All tests in this file share one engine with chunked prefill (16 tokens per step) and prefix
caching. The engine retains the hidden states of layers 0 and 2.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ar_engine import PROMPTS, SCHEDULER, WORKER, Reference, assert_hidden_states, params, states_of
from helpers.ar_compatibility import feature
from helpers.waits import pause_task
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.hidden_states import concat, hidden_states_of
from vllm_omni.outputs import RequestFailed

MAX_BYTES = 250 * 64 * 4


class Engine:
    """An AsyncLLM with its own event loop."""

    def __init__(self, model: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.numbers = iter(range(10**6))
        self.reference = Reference(model)
        self.engine = self.loop.run_until_complete(self._start(model))

    async def _start(self, model: Path) -> AsyncLLM:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                worker_cls=WORKER,
                scheduler_cls=SCHEDULER,
                dtype="float32",
                max_model_len=512,
                max_num_batched_tokens=16,
                max_num_seqs=8,
                enforce_eager=True,
                enable_prefix_caching=True,
                block_size=32,
                additional_config={
                    "omni": {"hidden_state_layers": [0, 2], "max_hidden_states_bytes": MAX_BYTES}
                },
            )
        )

    async def _stream(self, prompt: str, sampling: SamplingParams) -> list[RequestOutput]:
        return [
            out async for out in self.engine.generate(prompt, sampling, f"r{next(self.numbers)}")
        ]

    def run(self, *requests: tuple[str, SamplingParams]) -> list[list[RequestOutput]]:
        """Run all requests concurrently; return all outputs of each request."""

        async def together() -> Any:
            return await asyncio.gather(*(self._stream(*request) for request in requests))

        return self.loop.run_until_complete(together())

    def final(self, prompt: str, sampling: SamplingParams) -> RequestOutput:
        sampling.output_kind = RequestOutputKind.FINAL_ONLY
        return self.run((prompt, sampling))[0][-1]

    def rpc(self, method: str) -> Any:
        return self.loop.run_until_complete(self.engine.collective_rpc(method))[0]


@pytest.fixture(scope="module")
def engine(tiny_language_model: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        # vLLM would compile a function for log probabilities even with an eager model, which takes
        # 13 s.
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        running = Engine(tiny_language_model)
    yield running
    running.engine.shutdown()
    running.loop.run_until_complete(pause_task(0.1))  # lets the engine's tasks end


@feature("chunked prefill")
@pytest.mark.parametrize("mode", ["all", "generated", "last"])
def test_a_prompt_in_chunks(engine: Engine, mode: str) -> None:
    """A 50-token prompt that is prefilled in four steps yields the hidden states of every step
    once, in order.
    """
    output = engine.final(f"{PROMPTS[0]} and the {mode} one", params(mode, (-1, 0, 2)))
    assert len(output.prompt_token_ids or []) > 3 * 16
    assert_hidden_states(output, engine.reference, mode, (-1, 0, 2))


@feature("mixed batches")
def test_requests_without_hidden_states_are_unchanged(engine: Engine) -> None:
    """A request without hidden states is unaffected by requests with hidden states in its batch.

    Its output has the same text as when the request runs by itself, and no hidden states.
    """
    alone = [engine.final(prompt, params(None)).outputs[0] for prompt in PROMPTS]
    requested = [
        params("all"),
        params(None),
        params("generated", (2,)),
        params(None),
        params("last"),
        params(None),
    ]
    for sampling in requested:
        sampling.output_kind = RequestOutputKind.FINAL_ONLY
    prompts = [PROMPTS[i // 2] for i in range(6)]
    outputs = [outs[-1] for outs in engine.run(*zip(prompts, requested, strict=True))]
    for i, output in enumerate(outputs):
        assert output.outputs[0].token_ids == alone[i // 2].token_ids
    assert [hidden_states_of(outputs[i]) for i in (1, 3, 5)] == [None] * 3
    assert_hidden_states(outputs[0], engine.reference)
    assert_hidden_states(outputs[2], engine.reference, "generated", (2,))
    assert_hidden_states(outputs[4], engine.reference, "last")


@feature("prefix caching")
def test_mode_all_computes_cached_tokens_again(engine: Engine) -> None:
    """The `all` mode skips the prefix cache, whereas the `generated` and `last` modes use it. The
    hidden states are complete in every mode.
    """
    prompt = "the small bird sleeps in the green tree by the sea and flies over the road"
    first, second = (engine.final(prompt, params(None)) for _ in range(2))
    assert not first.num_cached_tokens and second.num_cached_tokens == 64
    complete = engine.final(prompt, params("all"))
    assert not complete.num_cached_tokens
    assert_hidden_states(complete, engine.reference)
    for mode in ("generated", "last"):
        output = engine.final(prompt, params(mode))
        assert output.num_cached_tokens == 64
        assert_hidden_states(output, engine.reference, mode)


@feature("streaming")
def test_deltas_carry_the_new_hidden_states(engine: Engine) -> None:
    """With delta outputs, the first output contains the hidden states of the prompt, and later
    outputs contain those of their own tokens.

    Together, the outputs contain every hidden state.
    """
    [outputs] = engine.run(
        (PROMPTS[0], params("all", max_tokens=60, output_kind=RequestOutputKind.DELTA))
    )
    parts = [hidden_states_of(output) for output in outputs]
    counts = [0 if part is None else part.num_positions for part in parts]
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    assert len(parts) > 3
    assert counts == [len(outputs[0].prompt_token_ids or []) + tokens[0] - 1, *tokens[1:]]
    joined = concat(parts)
    final = states_of(engine.final(PROMPTS[0], params("all", max_tokens=60)))
    assert joined is not None and torch.equal(joined.positions, final.positions)
    torch.testing.assert_close(joined[-1], final[-1], atol=1e-5, rtol=1e-5)


@feature("streaming")
def test_a_slow_reader_receives_all_hidden_states(engine: Engine) -> None:
    """A slow reader receives all hidden states, although vLLM merges outputs that have not been
    read.
    """

    async def slow() -> list[Any]:
        parts = []
        sampling = params("all", max_tokens=20, output_kind=RequestOutputKind.DELTA)
        async for output in engine.engine.generate(PROMPTS[1], sampling, "slow"):
            parts.append((hidden_states_of(output), len(output.outputs[0].token_ids)))
            await pause_task(0.2)
        return parts

    parts = engine.loop.run_until_complete(slow())
    joined = concat([states for states, _ in parts])
    assert len(parts) < 20 and sum(count for _, count in parts) == 20
    assert joined is not None and joined.positions.tolist() == list(range(len(PROMPTS[1]) + 19))


@feature("streaming")
def test_cumulative_outputs_carry_all_hidden_states_at_the_end(engine: Engine) -> None:
    [outputs] = engine.run((PROMPTS[0], params("all", output_kind=RequestOutputKind.CUMULATIVE)))
    assert [hidden_states_of(output) for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert_hidden_states(outputs[-1], engine.reference)


@feature("several completions (n)")
def test_each_completion_has_its_own_hidden_states(engine: Engine) -> None:
    """With n=3 sampled completions of one prompt, each completion has its own hidden states."""
    output = engine.final(PROMPTS[1], params("generated", n=3, temperature=1.0))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for i, completion in enumerate(output.outputs):
        states = hidden_states_of(output, i)
        assert states is not None and states.token_ids.tolist() == list(completion.token_ids)[:-1]
        expected = engine.reference.hidden_states(
            [*(output.prompt_token_ids or []), *completion.token_ids]
        )
        torch.testing.assert_close(states[-1], expected[-1][states.positions], atol=1e-4, rtol=1e-4)


@feature("stop strings")
@pytest.mark.parametrize("mode", ["all", "last"])
def test_a_stop_string_cuts_hidden_states_with_tokens(engine: Engine, mode: str) -> None:
    """When the front end detects a stop string, it truncates the tokens and the hidden states. The
    last remaining token has no hidden state.
    """
    free = engine.final(PROMPTS[0], params(None, max_tokens=30, ignore_eos=True))
    stop = next(part for part in free.outputs[0].text[2:] if part.isascii() and part.isprintable())
    output = engine.final(PROMPTS[0], params(mode, max_tokens=30, stop=[stop]))
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason == stop
    assert_hidden_states(output, engine.reference, mode)


@feature("grammar masks (structured outputs)")
@pytest.mark.parametrize("mode", ["all", "generated"])
def test_structured_outputs_with_hidden_states(engine: Engine, mode: str) -> None:
    """With structured outputs, a request with hidden states returns the same text as a request
    without hidden states.
    """
    grammar = {
        "structured_outputs": StructuredOutputsParams(regex="(yes|no) (red|blue)"),
        "ignore_eos": False,
    }
    plain = engine.final(PROMPTS[0], params(None, **grammar))
    output = engine.final(PROMPTS[0], params(mode, **grammar))
    assert (
        output.outputs[0].text
        == plain.outputs[0].text
        in ("yes red", "yes blue", "no red", "no blue")
    )
    assert_hidden_states(output, engine.reference, mode)


@feature("logprobs, penalties, seeds")
def test_other_sampling_options_are_unchanged(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    options |= {"repetition_penalty": 1.2, "min_tokens": 3}
    # The prompt is short because vLLM's CPU runner cannot prefill a seeded request in several
    # chunks ("CPU Generator does not use offset").
    plain, output = (engine.final(PROMPTS[2], params(mode, **options)) for mode in (None, "all"))
    assert plain.outputs[0].token_ids == output.outputs[0].token_ids
    assert plain.outputs[0].cumulative_logprob == pytest.approx(
        output.outputs[0].cumulative_logprob
    )
    assert len(output.prompt_logprobs or []) == len(output.prompt_token_ids or [])
    assert_hidden_states(output, engine.reference)


@feature("size limit")
def test_the_byte_limit_fails_only_its_request(engine: Engine) -> None:
    """A request that exceeds the limit of 250 hidden states fails, but the other requests in its
    batch do not.
    """
    long = "the sea is blue " * 17
    kinds = {"output_kind": RequestOutputKind.FINAL_ONLY}
    outputs = engine.run(
        (long, params("all", **kinds)),
        (PROMPTS[1], params("all", max_tokens=240, **kinds)),
        (PROMPTS[1], params("all", **kinds)),
        (long, params("generated", **kinds)),
    )
    for outs in outputs[:2]:
        assert outs[-1].outputs[0].finish_reason == "error"
        with pytest.raises(RequestFailed, match="max_hidden_states_bytes") as failed:
            hidden_states_of(outs[-1])
        assert failed.value.code == "too_large"
    assert_hidden_states(outputs[2][-1], engine.reference)
    assert_hidden_states(outputs[3][-1], engine.reference, "generated")


@feature("wrong requests")
@pytest.mark.parametrize(
    ("omni", "code"),
    [
        ({"hidden_states": "many"}, "invalid_request"),
        ({"hidden_states": "all", "layers": [1]}, "unsupported_layer"),
        ({"hidden_states": "all", "layers": [-9]}, "unsupported_layer"),
        ("not json", "invalid_request"),
    ],
)
def test_an_invalid_request_fails_with_the_reason(engine: Engine, omni: Any, code: str) -> None:
    """An invalid request fails with an error that states the reason, and another request in its
    batch is unaffected.
    """
    kinds = {"output_kind": RequestOutputKind.FINAL_ONLY}
    bad = params(None, extra_args={"omni": omni}, **kinds)
    failed_outputs, good = engine.run((PROMPTS[0], bad), (PROMPTS[0], params("all", **kinds)))
    with pytest.raises(RequestFailed) as failed:
        hidden_states_of(failed_outputs[-1])
    assert failed.value.code == code
    assert_hidden_states(good[-1], engine.reference)


@feature("bytes copied = bytes asked for")
@pytest.mark.parametrize(("mode", "num_states"), [("all", 18 + 7), ("generated", 7), (None, 0)])
def test_only_requested_hidden_states_are_copied(
    engine: Engine, mode: str | None, num_states: int
) -> None:
    """For a request with hidden states, the engine copies tokens x layers x width x 4 bytes; for
    other requests, it copies nothing.
    """
    before = engine.rpc("hidden_states_stats")["bytes_copied"]
    engine.final(PROMPTS[1], params(mode, (0, -1)))
    assert len(PROMPTS[1]) == 18
    assert engine.rpc("hidden_states_stats")["bytes_copied"] - before == num_states * 2 * 64 * 4
