# SPDX-License-Identifier: Apache-2.0
"""Tests of the conditions under which the next chunk can reuse a prompt's cross-attention keys and
values.
"""

from dataclasses import dataclass

import pytest
import torch

from vllm_omni.model_executor.models.wan.text_encoder.prompts import known_cross_kv

KV = torch.ones(2)


@dataclass(frozen=True)
class Before:
    prompt: str | None
    cross_kv: torch.Tensor | None


@pytest.mark.parametrize(
    ("before", "same_adapters", "is_known"),
    [
        (Before("a village", KV), True, True),
        (Before("a village", KV), False, False),  # computed with other weights
        (Before("a coast", KV), True, False),
        (Before("a village", None), True, False),
        (Before(None, None), True, False),
    ],
    ids=["equal", "other adapters", "other prompt", "not held", "no chunk"],
)
def test_an_equal_prompt_under_the_same_adapters_is_known(
    before: Before, same_adapters: bool, is_known: bool
) -> None:
    found = known_cross_kv(before, "a village", same_adapters=same_adapters)
    assert (found is KV) == is_known
    assert is_known or found is None
