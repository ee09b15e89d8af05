# SPDX-License-Identifier: Apache-2.0
"""HiddenStatesStore: each completion once, a bound in bytes, an end in seconds."""

import pytest
import torch

from vllm_omni.entrypoints.engine.environment import read_struct
from vllm_omni.entrypoints.hidden_states_store import HiddenStatesStore, StoreLimits
from vllm_omni.hidden_states import HiddenStates
from vllm_omni.outputs import RequestFailed


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def states(value: float, num_rows: int = 2) -> HiddenStates:
    """`num_rows` rows of 16 bytes."""
    return HiddenStates(
        {-1: torch.full((num_rows, 4), float(value))},
        torch.arange(num_rows),
        torch.arange(num_rows),
    )


def value(found: HiddenStates) -> float:
    return float(found[-1][0, 0])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> HiddenStatesStore:
    return HiddenStatesStore(
        StoreLimits(hidden_states_store_bytes=100, hidden_states_expiry_s=10), clock
    )


def keep(store: HiddenStatesStore, request_id: str, *values: float | None) -> None:
    """A request of as many completions; None = this one has no rows."""
    store.open_request(request_id)
    store.end(
        request_id, {i: states(v) for i, v in enumerate(values) if v is not None}, len(values)
    )


def code_of(store: HiddenStatesStore, response_id: str, index: int = 0) -> str:
    with pytest.raises(RequestFailed) as failed:
        store.fetch(response_id, index)
    return failed.value.code


def test_each_choice_is_handed_out_once(store: HiddenStatesStore) -> None:
    keep(store, "chatcmpl-a", 1, 2)
    assert value(store.fetch("chatcmpl-a", 1)) == 2 and value(store.fetch("chatcmpl-a", 0)) == 1
    assert code_of(store, "chatcmpl-a") == "not_found" and store.nbytes == 0


def test_rows_belong_to_the_key_that_requested_for_them(store: HiddenStatesStore) -> None:
    """Clients may choose request ids: two keys with the same one have each their own rows."""
    for principal, number in (("a", 1.0), ("b", 2.0)):
        store.open_request("chatcmpl-x", principal)
        assert code_of(store, "chatcmpl-x") == "not_found"
        store.end("chatcmpl-x", {0: states(number)}, principal=principal)
    assert (
        value(store.fetch("chatcmpl-x", 0, "b")) == 2
        and code_of(store, "chatcmpl-x") == "not_found"
    )
    assert value(store.fetch("chatcmpl-x", 0, "a")) == 1


def test_choices_of_several_prompts_are_counted_through(store: HiddenStatesStore) -> None:
    """`/v1/completions` with two prompts and n=2: choice 2 is the second prompt's first."""
    for order in ((0, 1, 2), (2, 0, 1)):
        keep(store, "cmpl-a-1", 3, None)
        keep(store, "cmpl-a-0", 1, 2)
        assert [value(store.fetch("cmpl-a", index)) for index in order] == [
            index + 1 for index in order
        ]
        assert store.nbytes == 0


def test_rows_are_never_those_of_another_choice(store: HiddenStatesStore) -> None:
    """A choice without rows (one generated token has none) or whose rows made room leaves its
    number empty.
    """
    keep(store, "cmpl-a-0", None, None)
    keep(store, "cmpl-a-1", None, 4)
    assert [code_of(store, "cmpl-a", index) for index in (0, 1, 2)] == ["not_found"] * 3
    assert value(store.fetch("cmpl-a", 3)) == 4
    for number in range(4):  # 100 bytes hold three results of 32
        keep(store, f"cmpl-b-{number}", number)
    assert code_of(store, "cmpl-b", 0) == "not_found"
    assert [value(store.fetch("cmpl-b", index)) for index in (1, 2, 3)] == [1, 2, 3]


def test_ids_that_clients_choose_are_retained_apart(store: HiddenStatesStore) -> None:
    """`X-Request-Id: walk` and `X-Request-Id: walk-7` are two chats."""
    keep(store, "chatcmpl-walk-7", 7)
    store.open_request("chatcmpl-walk-8")
    keep(store, "chatcmpl-walk", 1)
    assert (
        value(store.fetch("chatcmpl-walk", 0)) == 1
        and value(store.fetch("chatcmpl-walk-7", 0)) == 7
    )


def test_a_running_request_is_not_finished(store: HiddenStatesStore) -> None:
    """Also while another request under the same client-given id has ended."""
    store.open_request("chatcmpl-a")
    assert code_of(store, "chatcmpl-a") == "not_finished"
    keep(store, "chatcmpl-a", 1)
    assert code_of(store, "chatcmpl-a") == "not_finished"
    store.end("chatcmpl-a", {})
    assert code_of(store, "chatcmpl-a") == "not_found"


def test_rows_expire(store: HiddenStatesStore, clock: Clock) -> None:
    keep(store, "a", 1)
    clock.now_s = 9.9
    keep(store, "b", 2)
    clock.now_s = 10.0
    assert code_of(store, "a") == "not_found" and store.nbytes == 32
    assert value(store.fetch("b", 0)) == 2


def test_the_oldest_make_room(store: HiddenStatesStore) -> None:
    """100 bytes hold three results of 32."""
    for i, name in enumerate("abcd"):
        keep(store, name, i)
        assert store.nbytes <= 100
    assert (
        code_of(store, "a") == "not_found"
        and value(store.fetch("b", 0)) == 1
        and value(store.fetch("d", 0)) == 3
    )


def test_a_result_larger_than_the_store_is_not_retained(store: HiddenStatesStore) -> None:
    store.open_request("a")
    store.end("a", {0: states(1, num_rows=50)})
    assert store.nbytes == 0 and code_of(store, "a") == "not_found"


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_HIDDEN_STATES_EXPIRY_S", "5")
    assert read_struct(StoreLimits).hidden_states_expiry_s == 5
    monkeypatch.setenv("VLLM_OMNI_HIDDEN_STATES_STORE_BYTES", "-1")
    with pytest.raises(ValueError, match="VLLM_OMNI_HIDDEN_STATES_STORE_BYTES"):
        read_struct(StoreLimits)
