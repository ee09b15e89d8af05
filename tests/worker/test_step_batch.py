# SPDX-License-Identifier: Apache-2.0
"""Requests are grouped into batches by their batch key, up to the size limit, in the scheduler's
order.
"""

from types import SimpleNamespace

import pytest

from vllm_omni.model_executor.requests import group_states


@pytest.mark.parametrize(
    ("keys", "limit", "groups"),
    [
        ("", 4, []),
        ("aaaa", 4, ["aaaa"]),
        ("aaaa", 3, ["aaa", "a"]),
        ("abab", 4, ["aa", "bb"]),
        ("aabaa", 2, ["aa", "b", "aa"]),
        ("abc", 1, ["a", "b", "c"]),
    ],
)
def test_requests_with_equal_keys_share_a_batch(keys: str, limit: int, groups: list[str]) -> None:
    """Requests with the same batch key share a batch, up to the size limit. In this test, each
    letter is the batch key of one request.
    """
    model = SimpleNamespace(batch_key=lambda request: request.key)
    chunks = [
        SimpleNamespace(key=key, number=number, adapters=()) for number, key in enumerate(keys)
    ]
    states = [SimpleNamespace(chunk=chunk) for chunk in chunks]
    result = group_states(model, states, limit)  # type: ignore[arg-type]
    assert ["".join(state.chunk.key for state in group) for group in result] == groups
    for group in result:
        numbers = [state.chunk.number for state in group]
        assert numbers == sorted(numbers)


def test_requests_with_different_adapters_have_separate_batches() -> None:
    """Requests with different adapters run in separate batches, because adapters apply to a whole
    forward pass.
    """
    model = SimpleNamespace(batch_key=lambda request: request.key)
    chunks = [
        SimpleNamespace(key="a", adapters=adapters)
        for adapters in ((), ("ink",), (), ("ink",), ("wool",))
    ]
    groups = group_states(model, [SimpleNamespace(chunk=chunk) for chunk in chunks], 4)  # type: ignore[misc]
    adapters = [[state.chunk.adapters for state in group] for group in groups]  # type: ignore[union-attr]
    assert adapters == [[()] * 2, [("ink",)] * 2, [("wool",)]]
