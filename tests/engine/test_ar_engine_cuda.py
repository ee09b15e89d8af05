# SPDX-License-Identifier: Apache-2.0
"""The AR worker on CUDA with both of vLLM's model runners (V1 and V2), async scheduling and CUDA
graphs.

All tests share one engine per model runner, because starting an engine takes most of a test's time.
The other `test_ar_*_cuda.py` files test features that need other engines. They are separate files
because `make test-cuda` runs files side by side.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ar_cuda import FINAL, ON_CUDA, PROMPTS, WIDTH, Engine, Reference
from ar_engine import params
from helpers.ar_compatibility import feature
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_omni.hidden_states import concat, hidden_states_of
from vllm_omni.outputs import RequestFailed

pytestmark = ON_CUDA

MAX_BYTES = 260 * 3 * WIDTH * 2
"""Byte limit of the shared engines: 260 hidden states of three layers."""


@pytest.fixture(scope="module", params=["V2", "V1"])
def engine(request: pytest.FixtureRequest, cuda_language_model: Path) -> Iterator[Engine]:
    limit = {"max_hidden_states_bytes": MAX_BYTES}
    with Engine(cuda_language_model, request.param, limit) as running:
        yield running


@feature("async scheduling", "V2")
def test_hidden_states_arrive_with_the_chosen_runner(engine: Engine, reference: Reference) -> None:
    """With either of vLLM's model runners, the hidden states of a mixed batch match those of
    Hugging Face Transformers.
    """
    stats = engine.stats()
    assert stats["delivers"] and ("V2" in stats["runner"]) == (engine.runner == "V2")
    assert engine.engine.vllm_config.scheduler_config.async_scheduling
    modes = ["all", "generated", "last", "all"]
    layers = [(-1,), (2, -1), (-1,), (0, 2, -1)]
    requested = [
        params(m, k, max_tokens=12, output_kind=FINAL) for m, k in zip(modes, layers, strict=True)
    ]
    plain = [params(None, max_tokens=12, output_kind=FINAL) for _ in PROMPTS]
    outputs = engine.run(*zip(PROMPTS * 2, [*requested, *plain], strict=True))
    for [output], mode, wanted in zip(outputs[:4], modes, layers, strict=True):
        reference.check(output, mode, wanted)
    assert [hidden_states_of(out[-1]) for out in outputs[4:]] == [None] * 4


@feature("streaming", "V2")
def test_deltas_join_to_all_hidden_states(engine: Engine, reference: Reference) -> None:
    [outputs] = engine.run(
        (PROMPTS[0], params("all", max_tokens=24, output_kind=RequestOutputKind.DELTA))
    )
    joined = concat([hidden_states_of(output) for output in outputs])
    assert joined is not None and joined.positions.tolist() == list(range(len(PROMPTS[0]) + 23))


@feature("chunked prefill", "V2")
@feature("prefix caching", "V2")
def test_cached_and_chunked_prompts_are_complete(engine: Engine, reference: Reference) -> None:
    """A 204-token prompt that runs twice in chunks of 64 yields all of its hidden states. The `all`
    mode skips the prefix cache, whereas the `generated` mode uses it.
    """
    for mode in ("all", "all", "generated"):
        [[output]] = engine.run((PROMPTS[3], params(mode, max_tokens=6, output_kind=FINAL)))
        assert bool(output.num_cached_tokens) == (mode == "generated")
        reference.check(output, mode)


@feature("grammar masks (structured outputs)", "V2")
def test_structured_outputs_with_hidden_states(engine: Engine, reference: Reference) -> None:
    grammar = {
        "structured_outputs": StructuredOutputsParams(regex="(yes|no) (red|blue)"),
        "ignore_eos": False,
    }
    [[output]] = engine.run((PROMPTS[0], params("all", output_kind=FINAL, **grammar)))
    assert output.outputs[0].text in ("yes red", "yes blue", "no red", "no blue")
    reference.check(output)


@feature("bytes copied = bytes asked for", "V2")
def test_only_requested_hidden_states_are_copied(engine: Engine) -> None:
    """The engine copies only the requested hidden states, plus at most one more, because it may
    compute one token too many.
    """
    before = engine.stats()["bytes_copied"]
    engine.run((PROMPTS[1], params(None, max_tokens=10, output_kind=FINAL)))
    assert engine.stats()["bytes_copied"] == before
    engine.run((PROMPTS[1], params("all", max_tokens=10, output_kind=FINAL)))
    count, rest = divmod(engine.stats()["bytes_copied"] - before, WIDTH * 2)
    assert rest == 0 and 18 + 9 <= count <= 18 + 10


@feature("wrong requests", "V2")
def test_an_invalid_request_affects_no_other(engine: Engine, reference: Reference) -> None:
    bad, good = engine.run(
        (PROMPTS[0], params("all", (1,), output_kind=FINAL)),
        (PROMPTS[0], params("all", output_kind=FINAL)),
    )
    with pytest.raises(RequestFailed, match="hidden_state_layers"):
        hidden_states_of(bad[-1])
    reference.check(good[-1])


@feature("torch.compile", "V2", note="on CUDA together with CUDA graphs, as vLLM does by default")
def test_a_compiled_model_with_cuda_graphs(engine: Engine, reference: Reference) -> None:
    """With a compiled model, the hidden states of retained layers are outputs of the compiled
    graph, and decode steps replay CUDA graphs.
    """
    compilation = engine.engine.vllm_config.compilation_config
    assert compilation.mode == CompilationMode.VLLM_COMPILE
    assert compilation.cudagraph_mode != CUDAGraphMode.NONE
    [[output]] = engine.run(
        (PROMPTS[0], params("all", (0, 2, -1), max_tokens=20, output_kind=FINAL))
    )
    reference.check(output, layers=(0, 2, -1))


@feature("several completions (n)", "V2")
def test_each_completion_has_its_own_hidden_states(engine: Engine, reference: Reference) -> None:
    """With n=3 sampled completions of one prompt, each completion has its own hidden states."""
    [[output]] = engine.run(
        (PROMPTS[1], params("generated", n=3, temperature=1.0, output_kind=FINAL))
    )
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for index in range(3):
        reference.check(output, "generated", index=index)


@feature("size limit", "V2")
def test_the_byte_limit_fails_only_its_request(engine: Engine, reference: Reference) -> None:
    """Requests that exceed the limit of 260 hidden states fail, but other requests do not.

    One request exceeds the limit with its prompt, and another one while it generates.
    """
    long, layers = "the sea is blue " * 17, (0, 2, -1)
    outputs = engine.run(
        (long, params("all", layers, output_kind=FINAL)),
        (PROMPTS[1], params("all", layers, max_tokens=300, output_kind=FINAL)),
        (PROMPTS[1], params("all", layers, output_kind=FINAL)),
        (long, params("generated", layers, output_kind=FINAL)),
    )
    for [output] in outputs[:2]:
        assert output.outputs[0].finish_reason == "error"
        with pytest.raises(RequestFailed, match="max_hidden_states_bytes") as failed:
            hidden_states_of(output)
        assert failed.value.code == "too_large"
    assert len(outputs[1][0].outputs[0].token_ids) > 200
    reference.check(outputs[2][0], layers=layers)
    reference.check(outputs[3][0], "generated", layers)
