# SPDX-License-Identifier: Apache-2.0
"""Tests of hidden states: request parsing, transport through vLLM's output code, and errors."""

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni.hidden_states import (
    HiddenStates,
    HiddenStatesRequest,
    concat,
    encode_hidden_states,
    error_of,
    error_text,
    hidden_states_of,
)
from vllm_omni.outputs import RequestFailed


def completion(mask: SamplingMaskLists | None, **fields: Any) -> CompletionOutput:
    chosen = {
        "index": 0,
        "text": "",
        "token_ids": [1],
        "cumulative_logprob": None,
        "logprobs": None,
        **fields,
    }
    return CompletionOutput(
        sampling_mask=None if mask is None else SamplingMask(mask.to_nested_list()), **chosen
    )


def request_output(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", None, [1, 2], None, list(completions), True)


@pytest.mark.parametrize(
    "request_",
    [
        HiddenStatesRequest(hidden_states="all"),
        HiddenStatesRequest(hidden_states="generated", layers=(0, 2, -1)),
        HiddenStatesRequest(hidden_states="last", layers=(28,)),
    ],
)
def test_a_request_survives_extra_args(request_: HiddenStatesRequest) -> None:
    """A request for hidden states can be parsed from the map that `to_extra_args` returns, and from
    JSON text, as sent in `vllm_xargs`.
    """
    extra_args = request_.to_extra_args()
    assert HiddenStatesRequest.from_extra_args(extra_args) == request_
    as_text = {"omni": msgspec.json.encode(extra_args["omni"]).decode()}
    assert HiddenStatesRequest.from_extra_args(as_text) == request_


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}])
def test_no_request_is_none(extra_args: Any) -> None:
    """If `extra_args` has no entry for hidden states, parsing returns no request. Other entries are
    ignored.
    """
    assert HiddenStatesRequest.from_extra_args(extra_args) is None


@pytest.mark.parametrize(
    ("requested", "named"),
    [
        ({"hidden_states": "some"}, "hidden_states"),
        ({"hidden_states": True}, "hidden_states"),
        ({}, "hidden_states"),
        ({"layers": [1]}, "hidden_states"),
        ({"hidden_states": "all", "layer": [1]}, "layer"),
        ({"hidden_states": "all", "layers": []}, "layers"),
        ({"hidden_states": "all", "layers": [1.5]}, "layers"),
        ({"hidden_states": "all", "layers": ["last"]}, "layers"),
        ({"hidden_states": "all", "layers": [3, 3]}, "layers"),
        ({"hidden_states": "all", "layers": list(range(65))}, "layers"),
        ({"hidden_states": "all", "layers": 3}, "layers"),
        ("{not json", "omni"),
        ("[]", "omni"),
        (7, "omni"),
        ([], "omni"),
    ],
)
def test_a_malformed_request_says_what_is_wrong(requested: Any, named: str) -> None:
    """A malformed request fails with `invalid_request`, and the error names the field and the
    allowed values.
    """
    with pytest.raises(RequestFailed, match=named) as failed:
        HiddenStatesRequest.from_extra_args({"omni": requested})
    assert failed.value.code == "invalid_request"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5
    )
)
@settings(max_examples=200, deadline=None)
def test_any_rubbish_is_refused_with_the_one_documented_error(requested: Any) -> None:
    """Parsing raises no exception other than RequestFailed, whatever a client sends."""
    for value in (
        requested,
        {"hidden_states": requested},
        {"hidden_states": "all", "layers": requested},
    ):
        with contextlib.suppress(RequestFailed):
            request = HiddenStatesRequest.from_extra_args({"omni": value})
            if value is None:
                assert request is None
            else:
                assert request is not None and request.hidden_states in ("all", "generated", "last")
                assert request.layers and all(type(layer) is int for layer in request.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layers", [(-1,), (0, 7, -1)])
def test_rows_arrive_bit_for_bit(dtype: torch.dtype, layers: tuple[int, ...]) -> None:
    """Hidden states that end in zero bytes arrive complete. NumPy's byte-string dtype would drop
    these bytes.
    """
    rows = torch.randn(5, len(layers), 6).to(dtype)
    rows[1] = 0
    mask = encode_hidden_states(rows, layers, range(3, 8), [9, 8, 7, 6, 5], num_tokens=1)
    states = hidden_states_of(request_output(completion(mask)))
    assert states is not None and tuple(states) == layers
    for i, layer in enumerate(layers):
        assert states[layer].dtype == dtype and torch.equal(states[layer], rows[:, i])
    assert states.positions.tolist() == [3, 4, 5, 6, 7] and states.token_ids.tolist() == [
        9,
        8,
        7,
        6,
        5,
    ]
    assert states.num_positions == 5 and states.nbytes == rows.nbytes
    assert torch.equal(states.last[layers[0]], rows[-1:, 0])


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "counts"),
    [(40, 1, [40]), (3, 3, [1, 1, 1]), (5, 3, [3, 1, 1]), (1, 3, [0, 0, 1])],
)
def test_rows_are_assigned_to_the_tokens_they_came_with(
    num_rows: int, num_tokens: int, counts: list[int]
) -> None:
    """An output's hidden states are assigned to its tokens from the end, one per token. The first
    token gets all remaining hidden states.

    If tokens are cut off, their hidden states are dropped too.
    """
    mask = encode_hidden_states(
        torch.zeros(num_rows, 1, 4), (-1,), range(num_rows), range(num_rows), num_tokens
    )
    assert [len(rows) for rows in mask.to_nested_list()] == counts
    retained = mask.slice_request(0, 1).to_nested_list()
    assert [len(rows) for rows in retained] == counts[:1]


def test_rows_pass_vllms_wire_unchanged() -> None:
    """Hidden states arrive bit for bit when the engine core sends them to the front end through
    msgpack with out-of-band buffers, as in vLLM.
    """
    rows = torch.randn(50, 2, 32)
    mask = encode_hidden_states(rows, (0, -1), range(50), range(50), num_tokens=1)
    sent = EngineCoreOutput("r", [3], new_sampling_mask=mask)
    received = MsgpackDecoder(EngineCoreOutput).decode(MsgpackEncoder().encode(sent))
    states = hidden_states_of(completion(received.new_sampling_mask))
    assert states is not None and torch.equal(states[-1], rows[:, 1])


def test_a_slow_reader_of_deltas_loses_no_row() -> None:
    """A slow reader loses no hidden states: when vLLM merges unread deltas, their hidden states are
    merged along with the tokens.
    """
    rows = torch.randn(4, 1, 8)
    first = request_output(completion(encode_hidden_states(rows[:2], (-1,), [0, 1], [5, 6], 1)))
    first.add(
        request_output(completion(encode_hidden_states(rows[2:3], (-1,), [2], [7], 1))),
        aggregate=True,
    )
    first.add(request_output(completion(None)), aggregate=True)
    first.add(
        request_output(completion(encode_hidden_states(rows[3:], (-1,), [3], [8], 1))),
        aggregate=True,
    )
    states = hidden_states_of(first)
    assert (
        states is not None
        and torch.equal(states[-1], rows[:, 0])
        and states.positions.tolist() == [0, 1, 2, 3]
    )


def test_consecutive_deltas_join() -> None:
    """A streaming client can join the deltas' hidden states with `concat`. A delta without hidden
    states is represented as None.
    """
    parts = [
        hidden_states_of(
            completion(
                encode_hidden_states(torch.full((n, 1, 4), float(n)), (-1,), range(n), range(n), 1)
            )
        )
        for n in (2, 1)
    ]
    joined = concat([None, *parts, None])
    assert isinstance(joined, HiddenStates)
    assert joined.positions.tolist() == [0, 1, 0] and joined[-1][:, 0].tolist() == [2.0, 2.0, 1.0]
    assert concat([None]) is None


def test_mode_last_returns_only_the_newest_row() -> None:
    """In `last` mode with stop strings, the engine sends each step's last hidden state, but the
    client receives only the most recent one.
    """
    rows = [
        encode_hidden_states(torch.full((1, 1, 4), float(i)), (-1,), [i], [i], 1, newest_only=True)
        for i in range(3)
    ]
    merged = request_output(completion(rows[0]))
    for mask in rows[1:]:
        merged.add(request_output(completion(mask)), aggregate=True)
    joined = concat([hidden_states_of(completion(mask)) for mask in rows])
    for states in (hidden_states_of(merged), joined):
        assert (
            states is not None
            and states.positions.tolist() == [2]
            and states[-1][:, 0].tolist() == [2.0]
        )


def test_an_output_without_rows_is_none() -> None:
    """An output has no hidden states if the request did not ask for them, or if the engine does not
    use this package's scheduler.
    """
    assert hidden_states_of(request_output(completion(None))) is None


def test_the_reason_of_a_failed_request_is_raised() -> None:
    """The engine transmits a failed request's error as a stop reason, and reading the output
    re-raises that error.
    """
    failed = RequestFailed("too_large", 'the "limit" is 5 bytes')
    output = request_output(completion(None, finish_reason="error", stop_reason=error_text(failed)))
    with pytest.raises(RequestFailed, match="limit") as raised:
        hidden_states_of(output)
    assert (raised.value.code, raised.value.message) == (failed.code, failed.message)
    assert error_of("\n") is None and error_of(17) is None and error_of(None) is None


def test_a_real_sampling_mask_is_not_read_as_rows() -> None:
    """If the output field contains a real vLLM sampling mask, reading it raises an error instead of
    returning it as hidden states.
    """
    mask = SamplingMaskLists(np.array([b"123456789012345678901234567890"]), np.array([0, 1]))
    with pytest.raises(ValueError, match="not hidden states"):
        hidden_states_of(completion(mask))
