# SPDX-License-Identifier: Apache-2.0
"""Streams: turns within a session, due times, what is learnt of chunks, who counts as live."""

import math

import pytest

from vllm_omni.core.sched.policy import StepCosts
from vllm_omni.core.sched.streams import RequestFields, Streams
from vllm_omni.core.step_output import ChunkProgress

COSTS = StepCosts(size_s=0.1)


def fields(session: str, chunk: float = 0, **values: object) -> RequestFields:
    return RequestFields(session, chunk, **values)  # type: ignore[arg-type]


def heads(streams: Streams) -> list[str]:
    return [request.request_id for request in streams.runnable(())]


def finish(streams: Streams, name: str, num_steps: int = 2, size: int = 1, now_s: float = 0.0) -> None:
    streams.mark_stepped(name)
    for step in range(1, num_steps):
        streams.advance(name, ChunkProgress(step, num_steps, size), now_s)
    streams.end_turn(name, now_s)


def test_one_request_of_a_session_at_a_time_by_chunk_index() -> None:
    streams = Streams(10.0)
    for chunk in (2, 1):
        streams.add(f"s{chunk}", fields("s", chunk), 0.0)
    streams.add("t0", fields("t"), 0.0)
    assert heads(streams) == ["s1", "t0"] and len(streams) == 2
    streams.mark_stepped("s1")
    streams.add("s0", fields("s", 0), 0.0)
    assert heads(streams) == ["s1", "t0"], "what has begun is not overtaken"
    streams.end_turn("s1", 0.0)
    streams.end_turn("s1", 0.0)
    assert sorted(heads(streams)) == ["s0", "t0"]


def test_due_times() -> None:
    """A deadline counts from arrival; of requests without one a step is due every `patience_s`, begun ones first."""
    streams = Streams(10.0)
    for number, name in enumerate("abc"):
        streams.add(name, fields(name, deadline_s=0.5 if name == "a" else None), 100.0 + number)
    a, b, c = streams.runnable(())
    assert (a.due_s, b.due_s, c.due_s) == (100.5, 111.0, 121.0)
    assert (a.has_deadline, b.has_deadline, c.has_deadline) == (True, False, False)
    for name in "ac":
        streams.advance(name, ChunkProgress(1, 20, 64), 103.0)
    streams.runnable(())
    assert (a.due_s, a.steps_left, a.size, b.due_s, c.due_s) == (100.5, 19, 64.0, 123.0, 113.0)


def test_session_operations_are_due_at_once() -> None:
    streams = Streams(10.0)
    streams.add("chunk", fields("s", deadline_s=0.5), 100.0)
    streams.add("close", RequestFields("t", math.inf, is_chunk=False), 100.0)
    chunk, close = streams.runnable(())
    assert close.due_s < chunk.due_s and close.size == 0.0


def test_a_chunk_is_expected_to_be_like_the_one_before() -> None:
    """Of its own stream; a stream's first one like whatever was last."""
    streams = Streams(10.0)
    for session, steps, size in (("s", 4, 100), ("t", 8, 50)):
        streams.add(session, fields(session), 0.0)
        finish(streams, session, steps, size)
    for session in "stu":
        streams.add(f"{session}1", fields(session, 1), 0.0)
    found = {request.request_id: (request.steps_left, request.size) for request in streams.runnable(())}
    assert found == {"s1": (4, 100.0), "t1": (8, 50.0), "u1": (8, 50.0)}


def test_only_new_streams_are_refused_and_only_live_ones_count() -> None:
    streams = Streams(10.0)
    new = fields("new", period_s=0.3)
    assert streams.refusal(new, 0.0, COSTS) is None, "nothing is known yet"
    streams.add("s", fields("s", period_s=0.3), 0.0)
    finish(streams, "s", num_steps=2, size=1)
    assert streams.refusal(new, 0.5, COSTS) is not None
    assert streams.refusal(fields("new"), 0.5, COSTS) is None, "it asks for no rate"
    assert streams.refusal(fields("new", 5, period_s=0.3), 0.5, COSTS) is None, "not its first chunk"
    assert streams.refusal(fields("s", 1, period_s=0.3), 0.5, COSTS) is None, "it is being served"
    assert streams.refusal(new, 1.5, COSTS) is None, "the other one has been silent for long"


def test_a_closed_stream_makes_room_at_once() -> None:
    streams = Streams(10.0)
    streams.add("s", fields("s", period_s=0.3), 0.0)
    finish(streams, "s")
    streams.add("close", RequestFields("s", math.inf, is_chunk=False), 0.1)
    streams.end_turn("close", 0.1)
    assert streams.refusal(fields("new", period_s=0.3), 0.2, COSTS) is None


def test_quality_goes_down_for_a_chunk_that_would_be_late_and_comes_back() -> None:
    streams = Streams(10.0, num_levels=2)
    streams.add("s0", fields("s", 0, deadline_s=5.0), 0.0)
    assert streams.decide_level("s0", 0.0, streams.runnable(()), COSTS) == 0
    finish(streams, "s0", num_steps=4)
    streams.add("s1", fields("s", 1, deadline_s=0.3), 10.0)
    assert streams.decide_level("s1", 10.0, streams.runnable(()), COSTS) == 1
    finish(streams, "s1", num_steps=2)
    streams.add("s2", fields("s", 2, deadline_s=0.3), 20.0)
    assert streams.decide_level("s2", 20.0, streams.runnable(()), COSTS) == 1
    finish(streams, "s2", num_steps=2)
    streams.add("s3", fields("s", 3, deadline_s=5.0), 30.0)
    assert streams.decide_level("s3", 30.0, streams.runnable(()), COSTS) == 0


def test_a_level_that_decodes_cheaper_is_told_from_one_that_saves_nothing() -> None:
    """Chunks of 4 x 0.1 s and 0.3 s at their end: of three levels the second saves nothing, the third 0.25 s."""
    costs = StepCosts(size_s=0.1, last_s=0.3, degraded_last_s=(0.3, 0.05))
    streams = Streams(10.0, num_levels=3)
    for index, (deadline_s, level) in enumerate([(5.0, 0), (0.8, 0), (0.65, 2), (0.75, 2), (0.8, 0)]):
        name, now_s = f"s{index}", 10.0 * index
        streams.add(name, fields("s", index, deadline_s=deadline_s, period_s=0.75), now_s)
        assert streams.decide_level(name, now_s, streams.runnable(()), costs) == level
        live = streams.get(name)
        assert live is not None and live.level == level
        finish(streams, name, num_steps=4, now_s=now_s)


def test_a_neighbours_degraded_chunk_counts_as_what_it_takes() -> None:
    """0.2 instead of 0.5 s of it are ahead, so that the next chunk (0.5 s, due in 0.75) need not go without a thing."""
    costs = StepCosts(size_s=0.1, last_s=0.3, degraded_last_s=(0.0,))
    streams = Streams(10.0, num_levels=2)
    for name in ("n", "s"):
        streams.add(f"{name}0", fields(name, 0), 0.0)
        finish(streams, f"{name}0", num_steps=2)
    for name, deadline_s, level in (("n1", 0.35, 1), ("s1", 0.75, 0)):
        streams.add(name, fields(name[0], 1, deadline_s=deadline_s), 10.0)
        assert streams.decide_level(name, 10.0, streams.runnable(()), costs) == level


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (None, RequestFields("r", math.inf, is_chunk=False)),
        ({"omni": 3}, RequestFields("r", math.inf, is_chunk=False)),
        ({"omni": {"session_id": 3, "chunk_index": "x"}}, RequestFields("r", math.inf)),
        ({"omni": {"session_id": "s", "op": "close"}}, RequestFields("s", math.inf, is_chunk=False)),
        ({"omni": {"session_id": "s", "deadline_s": -1, "chunk_period_s": "1"}}, RequestFields("s", math.inf)),
        (
            {"omni": {"session_id": "s", "chunk_index": 3, "deadline_s": 1, "chunk_period_s": 0.5}},
            RequestFields("s", 3, deadline_s=1.0, period_s=0.5),
        ),
    ],
)
def test_what_is_read_of_a_request(extra: dict[str, object] | None, expected: RequestFields) -> None:
    """Whatever a client sends: wrong types are as if they were not there (the runner says what is wrong)."""
    assert RequestFields.read("r", extra) == expected


def test_memory_of_streams_is_bounded() -> None:
    streams = Streams(10.0)
    for number in range(5000):
        streams.add(str(number), fields(f"s{number}"), 0.0)
        finish(streams, str(number))
    assert len(streams) == 0 and len(streams._streams) == 4096
