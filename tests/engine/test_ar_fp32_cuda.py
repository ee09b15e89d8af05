# SPDX-License-Identifier: Apache-2.0
"""The AR worker on CUDA in fp32, where tokens and hidden states can be compared between runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ar_cuda import FINAL, ON_CUDA, PROMPTS, Engine, Reference, check_all_modes
from ar_engine import params
from helpers.ar_compatibility import feature

from vllm_omni.hidden_states import hidden_states_of

pytestmark = ON_CUDA


@pytest.fixture(scope="module")
def exact(cuda_language_model: Path) -> Iterator[Engine]:
    """An fp32 engine with vLLM's V2 model runner."""
    with Engine(cuda_language_model, "V2", dtype="float32") as running:
        yield running


@pytest.fixture(scope="module")
def exact_reference(cuda_language_model: Path) -> Reference:
    return Reference(cuda_language_model, dtype=torch.float32)


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


@pytest.mark.nightly
def test_hidden_states_in_fp32_equal_transformers_on_v1(
    cuda_language_model: Path, exact_reference: Reference
) -> None:
    with Engine(cuda_language_model, "V1", dtype="float32") as running:
        check_all_modes(running, exact_reference)
