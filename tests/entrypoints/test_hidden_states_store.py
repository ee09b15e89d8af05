# SPDX-License-Identifier: Apache-2.0
"""`HiddenStatesStore` returns each result once, limits the number of bytes stored, and deletes
expired results.
"""

import pytest
import torch

from vllm_omni.entrypoints.engine.environment import read_struct
from vllm_omni.entrypoints.hidden_states_store import EntryKey, HiddenStatesStore, StoreLimits
from vllm_omni.hidden_states import HiddenStates
from vllm_omni.outputs import RequestFailed


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def states(value: float, num_rows: int = 2) -> HiddenStates:
    """Return hidden states for `num_rows` positions. Each position takes up 16 bytes."""
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


def store_results(
    store: HiddenStatesStore, response_id: str, *values: float | None, prompt_number: int = 0
) -> None:
    """Store the results of a prompt that has one completion per value. None represents a
    completion without hidden states.
    """
    key = EntryKey(response_id, prompt_number)
    store.open_request(key)
    store.end(key, {i: states(v) for i, v in enumerate(values) if v is not None}, len(values))


def code_of(store: HiddenStatesStore, response_id: str, index: int = 0) -> str:
    with pytest.raises(RequestFailed) as failed:
        store.fetch(response_id, index)
    return failed.value.code


def test_each_choice_can_be_fetched_once(store: HiddenStatesStore) -> None:
    store_results(store, "chatcmpl-a", 1, 2)
    assert value(store.fetch("chatcmpl-a", 1)) == 2 and value(store.fetch("chatcmpl-a", 0)) == 1
    assert code_of(store, "chatcmpl-a") == "not_found" and store.nbytes == 0


def test_results_belong_to_their_key(store: HiddenStatesStore) -> None:
    """Clients can choose their request ids, so two API keys that use the same request id have
    separate results.
    """
    for principal, number in (("a", 1.0), ("b", 2.0)):
        key = EntryKey("chatcmpl-x", principal=principal)
        store.open_request(key)
        assert code_of(store, "chatcmpl-x") == "not_found"
        store.end(key, {0: states(number)})
    assert (
        value(store.fetch("chatcmpl-x", 0, "b")) == 2
        and code_of(store, "chatcmpl-x") == "not_found"
    )
    assert value(store.fetch("chatcmpl-x", 0, "a")) == 1


def test_choices_of_several_prompts_are_numbered_consecutively(store: HiddenStatesStore) -> None:
    """In `/v1/completions` with two prompts and n=2, choice 2 is the first choice of the second
    prompt.
    """
    for order in ((0, 1, 2), (2, 0, 1)):
        store_results(store, "cmpl-a", 3, None, prompt_number=1)
        store_results(store, "cmpl-a", 1, 2)
        assert [value(store.fetch("cmpl-a", index)) for index in order] == [
            index + 1 for index in order
        ]
        assert store.nbytes == 0


def test_a_choice_never_gets_another_result(store: HiddenStatesStore) -> None:
    """If a choice has no hidden states, or its hidden states were evicted, its index stays empty
    and is never assigned to another result.
    """
    store_results(store, "cmpl-a", None, None)
    store_results(store, "cmpl-a", None, 4, prompt_number=1)
    assert [code_of(store, "cmpl-a", index) for index in (0, 1, 2)] == ["not_found"] * 3
    assert value(store.fetch("cmpl-a", 3)) == 4
    for number in range(4):  # 100 bytes hold three results of 32 bytes
        store_results(store, "cmpl-b", number, prompt_number=number)
    assert code_of(store, "cmpl-b", 0) == "not_found"
    assert [value(store.fetch("cmpl-b", index)) for index in (1, 2, 3)] == [1, 2, 3]


def test_similar_request_ids_are_separate(store: HiddenStatesStore) -> None:
    """`X-Request-Id: walk` and `X-Request-Id: walk-7` identify different requests."""
    store_results(store, "chatcmpl-walk-7", 7)
    store.open_request(EntryKey("chatcmpl-walk-8"))
    store_results(store, "chatcmpl-walk", 1)
    assert (
        value(store.fetch("chatcmpl-walk", 0)) == 1
        and value(store.fetch("chatcmpl-walk-7", 0)) == 7
    )


def test_a_running_request_is_not_finished(store: HiddenStatesStore) -> None:
    """A running request is not reported as finished, even if another request with the same id has
    finished.
    """
    store.open_request(EntryKey("chatcmpl-a"))
    assert code_of(store, "chatcmpl-a") == "not_finished"
    store_results(store, "chatcmpl-a", 1)
    assert code_of(store, "chatcmpl-a") == "not_finished"
    store.end(EntryKey("chatcmpl-a"), {})
    assert code_of(store, "chatcmpl-a") == "not_found"


def test_results_expire(store: HiddenStatesStore, clock: Clock) -> None:
    store_results(store, "a", 1)
    clock.now_s = 9.9
    store_results(store, "b", 2)
    clock.now_s = 10.0
    assert code_of(store, "a") == "not_found" and store.nbytes == 32
    assert value(store.fetch("b", 0)) == 2


def test_the_oldest_results_are_evicted(store: HiddenStatesStore) -> None:
    """The oldest results are evicted first: with a limit of 100 bytes, the three newest 32-byte
    results remain.
    """
    for i, name in enumerate("abcd"):
        store_results(store, name, i)
        assert store.nbytes <= 100
    assert (
        code_of(store, "a") == "not_found"
        and value(store.fetch("b", 0)) == 1
        and value(store.fetch("d", 0)) == 3
    )


def test_a_result_larger_than_the_store_is_discarded(store: HiddenStatesStore) -> None:
    store.open_request(EntryKey("a"))
    store.end(EntryKey("a"), {0: states(1, num_rows=50)})
    assert store.nbytes == 0 and code_of(store, "a") == "not_found"


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_HIDDEN_STATES_EXPIRY_S", "5")
    assert read_struct(StoreLimits).hidden_states_expiry_s == 5
    monkeypatch.setenv("VLLM_OMNI_HIDDEN_STATES_STORE_BYTES", "-1")
    with pytest.raises(ValueError, match="VLLM_OMNI_HIDDEN_STATES_STORE_BYTES"):
        read_struct(StoreLimits)
