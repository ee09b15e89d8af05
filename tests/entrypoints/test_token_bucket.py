# SPDX-License-Identifier: Apache-2.0
"""The bucket behind the doors' rates."""

from vllm_omni.entrypoints.token_bucket import TokenBucket


def test_a_burst_then_the_rate() -> None:
    """Full at first, empty after the burst, refilled with time, never above the burst; debts are paid first."""
    now_s = 0.0
    bucket = TokenBucket(10.0, 50.0, lambda: now_s)
    assert bucket.take(50)
    assert not bucket.take(1)
    now_s = 1.1
    assert bucket.take(10)
    assert not bucket.take(1)
    now_s = 1000.0
    assert bucket.take(50)
    assert not bucket.take(30)
    now_s = 1002.0
    assert not bucket.take(1)
    now_s = 1004.0
    assert bucket.take(9)
