# SPDX-License-Identifier: Apache-2.0
"""Grouping: equal keys share a batch up to the limit, the scheduler's order is kept."""

from types import SimpleNamespace

import pytest

from vllm_omni.worker.diffusion.batches import group_requests


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
def test_groups(keys: str, limit: int, groups: list[str]) -> None:
    """Letters are batch keys."""
    model = SimpleNamespace(batch_key=lambda request: request.key)
    requests = [SimpleNamespace(key=key, number=number, adapters=()) for number, key in enumerate(keys)]
    result = group_requests(model, requests, limit)  # type: ignore[arg-type]
    assert ["".join(request.key for request in group) for group in result] == groups
    for group in result:
        numbers = [request.number for request in group]
        assert numbers == sorted(numbers)


def test_requests_of_different_adapters_take_different_forwards() -> None:
    """Adapters belong to a whole forward."""
    model = SimpleNamespace(batch_key=lambda request: request.key)
    requests = [SimpleNamespace(key="a", adapters=adapters) for adapters in ((), ("ink",), (), ("ink",), ("wool",))]
    groups = group_requests(model, requests, 4)  # type: ignore[arg-type]
    assert [[request.adapters for request in group] for group in groups] == [[()] * 2, [("ink",)] * 2, [("wool",)]]
