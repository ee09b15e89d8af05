# SPDX-License-Identifier: Apache-2.0
"""PlayClock: when a stream's chunks are due."""

import pytest

from vllm_omni.entrypoints.realtime.connection.play_clock import PlayClock


def test_chunks_are_due_one_playing_time_apart() -> None:
    """Nine frames first, then twelve, at 12 a second; asked for as early as one likes."""
    clock = PlayClock()
    assert clock.schedule_chunk(9, 12, now_s=100.0) == pytest.approx((0.75, 0.75))
    assert clock.schedule_chunk(12, 12, now_s=100.2) == pytest.approx((1.55, 1.0))
    assert clock.schedule_chunk(12, 12, now_s=100.2) == pytest.approx((2.55, 1.0))


@pytest.mark.parametrize("now_s", [101.5, 900.0])
def test_a_stream_that_fell_behind_or_paused_starts_anew(now_s: float) -> None:
    """Being late does not pile up: the next chunk has its whole playing time again."""
    clock = PlayClock()
    clock.schedule_chunk(12, 12, now_s=100.0)
    assert clock.schedule_chunk(12, 12, now_s=now_s) == pytest.approx((1.0, 1.0))
