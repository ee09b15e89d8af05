# SPDX-License-Identifier: Apache-2.0
"""The AR worker on CUDA: both of vLLM's model runners (V1 and V2), async scheduling, CUDA graphs,
speculative decoding and adapters.

The file starts only five engines, because starting an engine takes most of a test's time.
test_ar_features_cuda.py covers the features that need additional engines.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ar_cuda import (
    PROMPTS,
    WIDTH,
    Engine,
    Reference,
    check_ngram_drafts,
    write_adapter,
    write_model,
)
from ar_eagle import BLOCKS, DRAFTER_LAYERS, write_eagle3_drafter
from ar_engine import params
from helpers.ar_compatibility import feature
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_omni.hidden_states import concat, hidden_states_of
from vllm_omni.outputs import RequestFailed

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FINAL = RequestOutputKind.FINAL_ONLY
MAX_BYTES = 260 * 3 * WIDTH * 2
"""Byte limit of the shared engines: 260 hidden states of three layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cuda_language_model"))


@pytest.fixture(scope="module", params=["V2", "V1"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    with Engine(model, request.param, {"max_hidden_states_bytes": MAX_BYTES}) as running:
        yield running


@pytest.fixture(scope="module")
def exact(model: Path) -> Iterator[Engine]:
    """An fp32 engine with vLLM's V2 model runner. Its tokens and hidden states can be compared
    between runs.
    """
    with Engine(model, "V2", dtype="float32") as running:
        yield running


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def exact_reference(model: Path) -> Reference:
    return Reference(model, dtype=torch.float32)


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


def test_hidden_states_in_fp32_equal_transformers(
    exact: Engine, exact_reference: Reference
) -> None:
    """In fp32, the hidden states of two layers match those of Hugging Face Transformers to within
    1e-3, for prompt tokens and generated tokens.
    """
    requested = params("all", (2, -1), max_tokens=12, output_kind=FINAL)
    for [output] in exact.run((PROMPTS[0], requested), (PROMPTS[3], requested)):
        exact_reference.check(output, layers=(2, -1))


@feature("mixed batches", "V2")
def test_requests_without_hidden_states_are_unchanged(
    exact: Engine, exact_reference: Reference
) -> None:
    """A request without hidden states is unaffected by requests with hidden states in its batch.

    Its output has the same tokens as when the request runs by itself, and no hidden states.
    """
    alone = [
        exact.run((prompt, params(None, output_kind=FINAL)))[0][0].outputs[0].token_ids
        for prompt in PROMPTS[:3]
    ]
    requested: list[tuple[str | None, tuple[int, ...]]]
    requested = [
        ("all", (-1,)),
        (None, ()),
        ("generated", (2,)),
        (None, ()),
        ("last", (-1,)),
        (None, ()),
    ]
    sampling = [params(mode, layers, output_kind=FINAL) for mode, layers in requested]
    outputs = exact.run(*((PROMPTS[i // 2], sampling[i]) for i in range(6)))
    for i, ([output], (mode, layers)) in enumerate(zip(outputs, requested, strict=True)):
        assert output.outputs[0].token_ids == alone[i // 2]
        if mode is None:
            assert hidden_states_of(output) is None
        else:
            exact_reference.check(output, mode, layers)


@feature("logprobs, penalties, seeds", "V2")
def test_other_sampling_options_are_unchanged(exact: Engine, exact_reference: Reference) -> None:
    """A seeded request with all sampling options returns the same tokens and probabilities with and
    without hidden states. Its prompt is prefilled in four chunks.
    """
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    options |= {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "min_tokens": 3,
        "output_kind": FINAL,
    }
    [[plain]] = exact.run((PROMPTS[3], params(None, **options)))
    [[output]] = exact.run((PROMPTS[3], params("all", **options)))
    assert plain.outputs[0].token_ids == output.outputs[0].token_ids
    assert plain.outputs[0].cumulative_logprob == pytest.approx(
        output.outputs[0].cumulative_logprob, abs=1e-2
    )
    assert [len(at) for at in output.outputs[0].logprobs or []] == [
        len(at) for at in plain.outputs[0].logprobs or []
    ]
    assert len(output.prompt_logprobs or []) == len(output.prompt_token_ids)
    exact_reference.check(output)


@feature("stop strings", "V2")
@pytest.mark.parametrize("mode", ["all", "last"])
def test_a_stop_string_cuts_hidden_states_with_tokens(
    exact: Engine, exact_reference: Reference, mode: str
) -> None:
    """When the front end detects a stop string, it truncates the tokens and the hidden states. The
    last remaining token has no hidden state.
    """
    [[free]] = exact.run((PROMPTS[0], params(None, max_tokens=30, output_kind=FINAL)))
    stop = next(part for part in free.outputs[0].text[2:] if part.isascii() and part.isprintable())
    [[output]] = exact.run(
        (PROMPTS[0], params(mode, max_tokens=30, stop=[stop], output_kind=FINAL))
    )
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason == stop
    exact_reference.check(output, mode)


@feature("speculative decoding (ngram)", "V2")
def test_rejected_drafts_have_no_hidden_states(model: Path, reference: Reference) -> None:
    check_ngram_drafts(model, reference, "V2")


@feature("speculative decoding (EAGLE-3, its layers)", "V2")
def test_a_drafter_and_requests_read_the_same_layers(tmp_path: Path) -> None:
    """The hidden states of accepted tokens are correct, even for layers that the drafter also
    reads.

    The engine runs in fp32, because wrong hidden states stand out clearly in that precision.
    """
    model = write_model(tmp_path / "model", num_hidden_layers=BLOCKS)
    drafter = write_eagle3_drafter(model, tmp_path / "drafter")
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 2}
    layers = {"hidden_state_layers": list(DRAFTER_LAYERS)}
    reference = Reference(model, dtype=torch.float32)
    with Engine(model, "V2", layers, dtype="float32", speculative_config=speculative) as running:
        for mode in ("all", "generated", "last"):
            requested = params(mode, (2, 5, -1), max_tokens=24, output_kind=FINAL)
            [[output]] = running.run((PROMPTS[3], requested))
            reference.check(output, mode, (2, 5, -1))


@feature("LoRA", "V2")
def test_hidden_states_include_the_adapter(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """In a batch of requests with and without an adapter, the hidden states of each request match
    those of Hugging Face Transformers with the same adapter or none.
    """
    adapted = Reference(model, write_adapter(model, tmp_path / "adapter"))
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "enforce_eager": True}
    with Engine(model, "V2", **lora) as running:
        requested = params("all", (2, -1), max_tokens=8, output_kind=FINAL)
        [with_adapter], [without] = running.run(
            (PROMPTS[3], requested, request), (PROMPTS[3], requested)
        )
        adapted.check(with_adapter, layers=(2, -1))
        reference.check(without, layers=(2, -1))
        with pytest.raises(AssertionError, match="relative error"):
            reference.check(with_adapter, layers=(2, -1))
