# SPDX-License-Identifier: Apache-2.0
"""The order of steps when several chunks of a session are in flight (`omni.chunks_in_flight`)."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.core.sched.streams import RequestFields, ScheduledStreams
from vllm_omni.core.step_protocol import ChunkProgress

STEPS = 4


def streams(limit: int, session: str = "s") -> ScheduledStreams:
    """Return a `ScheduledStreams` that contains one session, which has committed its first
    chunk.
    """
    found = ScheduledStreams(10.0, chunks_in_flight=limit)
    found.add_request("first", RequestFields(session, 0), 0.0)
    found.mark_stepped("first")
    found.committed("first")
    found.finish_request("first", 0.0)
    return found


def runnable_ids(found: ScheduledStreams, busy: tuple[str, ...] = ()) -> list[str]:
    return [request.request_id for request in found.runnable(busy)]


@pytest.mark.parametrize(
    ("limit", "after", "steps", "expected"),
    [
        # steps of chunks 1, 2, 3, ... (None = not started) -> chunks that may take the next step
        (1, 1, [None, None, None], [1]),
        (2, 1, [None, None, None], [1]),
        (2, 1, [0, None, None], [1]),
        (2, 1, [1, None, None], [1, 2]),
        (2, 1, [1, 1, None], [1]),
        (2, 1, [2, 1, None], [1, 2]),
        (2, 1, [3, 1, None], [1, 2]),
        (3, 1, [2, 1, None], [1, 2, 3]),
        (3, 1, [2, 2, 1], [1, 3]),
        (3, 1, [3, 2, 1], [1, 2, 3]),
        (4, 2, [1, None, None], [1]),
        (4, 2, [2, None, None], [1, 2]),
        (4, 2, [3, 1, None], [1, 2]),
        (4, 2, [3, 2, None], [1, 3]),
    ],
)
def test_a_chunk_keeps_its_distance_to_its_predecessor(
    limit: int, after: int, steps: list[int | None], expected: list[int]
) -> None:
    """A chunk may run its next step only if it stays at least `lag_steps` steps behind its
    predecessor.
    """
    found = streams(limit)
    found.order.lag_steps = after
    for chunk, step in enumerate(steps, 1):
        found.add_request(str(chunk), RequestFields("s", chunk), 0.0)
        if step is not None:
            found.mark_stepped(str(chunk))
            found.advance(str(chunk), ChunkProgress(step, STEPS, 1), 0.0)
    assert runnable_ids(found) == [str(chunk) for chunk in expected]
    assert [name for name in "123" if found.may_step(name)] == [str(chunk) for chunk in expected]
    assert len(found) == min(limit, 3)


def test_steps_in_flight_count() -> None:
    """A step of chunk 2 may be sent before chunk 1's step returns, because batches reach every
    pipeline stage in order.
    """
    found = streams(2)
    for chunk in (1, 2):
        found.add_request(str(chunk), RequestFields("s", chunk), 0.0)
    found.mark_stepped("1")
    assert runnable_ids(found, busy=("1",)) == ["2"]
    found.mark_stepped("2")
    assert runnable_ids(found, busy=("1", "2")) == []
    found.advance("1", ChunkProgress(1, STEPS, 1), 0.0)
    assert runnable_ids(found, busy=("2",)) == ["1"]


@pytest.mark.parametrize("position", ["before", "after"])
def test_a_session_operation_runs_alone(position: str) -> None:
    found = streams(3)
    close = RequestFields("s", math.inf, is_chunk=False)
    if position == "before":
        found.add_request("close", close, 0.0)
        found.mark_stepped("close")
        found.add_request("1", RequestFields("s", 1), 0.0)
        assert runnable_ids(found) == ["close"]
        return
    found.add_request("1", RequestFields("s", 1), 0.0)
    found.mark_stepped("1")
    found.add_request("close", close, 0.0)
    assert runnable_ids(found) == ["1"]
    found.finish_request("1", 0.0)
    assert runnable_ids(found) == ["close"]


@settings(max_examples=150, deadline=None)
@given(limit=st.integers(1, 5), after=st.integers(1, 3), data=st.data())
def test_no_chunk_overtakes_and_all_chunks_end(limit: int, after: int, data: st.DataObject) -> None:
    """Chunks stay in order, keep their distance and respect the limit for any choice of runnable
    chunks.

    Some chunks are aborted, and every chunk eventually ends.
    """
    found = streams(limit)
    found.order.lag_steps = after
    chunks = [str(chunk) for chunk in range(1, 7)]
    for chunk in chunks:
        found.add_request(chunk, RequestFields("s", int(chunk)), 0.0)
    done = dict.fromkeys(chunks, 0)
    left = list(chunks)
    while left:
        offered = runnable_ids(found)
        assert offered and 0 < len(offered) <= limit
        batch = data.draw(st.lists(st.sampled_from(offered), min_size=1, unique=True))
        before = dict(done)
        for chunk in batch:
            position = left.index(chunk)
            assert position == 0 or before[chunk] + after <= before[left[position - 1]]
            found.mark_stepped(chunk)
        for chunk in batch:
            done[chunk] += 1
            found.advance(chunk, ChunkProgress(done[chunk], STEPS, 1), 0.0)
            if done[chunk] == STEPS:
                assert chunk == left[0]
        ended = [chunk for chunk in batch if done[chunk] == STEPS]
        if data.draw(st.integers(0, 9)) == 0:  # an abort also ends successors that have started
            first = data.draw(st.sampled_from([chunk for chunk in left if done[chunk]]))
            ended += [
                chunk for chunk in left[left.index(first) :] if done[chunk] and chunk not in ended
            ]
        for chunk in ended:
            found.finish_request(chunk, 0.0)
            left.remove(chunk)
    assert not len(found) and not runnable_ids(found)
