# SPDX-License-Identifier: Apache-2.0
"""Tests of `TokenBucket`, which the endpoints use for rate limiting."""

import math

import pytest

from vllm_omni.entrypoints.limits.token_bucket import TokenBucket


def test_a_burst_then_the_rate() -> None:
    """A bucket starts full and refills over time, up to the burst size. Refilled tokens first pay
    off any debt.
    """
    now_s = 0.0
    bucket = TokenBucket(10.0, 50.0, lambda: now_s)
    assert bucket.take_tokens(50)
    assert not bucket.take_tokens(1)
    now_s = 1.1
    assert bucket.take_tokens(10)
    assert not bucket.take_tokens(1)
    now_s = 1000.0
    assert bucket.take_tokens(50)
    assert not bucket.take_tokens(30)
    now_s = 1002.0
    assert not bucket.take_tokens(1)
    now_s = 1004.0
    assert bucket.take_tokens(9)


def test_how_long_to_wait() -> None:
    """The waiting time is zero while a token is left. Otherwise, it is the time until the bucket
    has paid off any debt and contains a token.
    """
    now_s = 0.0
    bucket = TokenBucket(0.1, 3.0, lambda: now_s)
    bucket.take_tokens(2)
    assert bucket.wait_s() == 0
    bucket.take_tokens(2)
    assert bucket.wait_s() == pytest.approx(20.0)
    now_s += bucket.wait_s()
    assert bucket.wait_s() == 0


def test_a_bucket_without_a_bound_is_never_empty() -> None:
    bucket = TokenBucket(0.0, math.inf)
    assert bucket.take_tokens(1e30)
    assert bucket.wait_s() == 0
