# SPDX-License-Identifier: Apache-2.0
"""`ScheduledStreams`: order within a session, due times, predicted steps and sizes, levels and
refusals.
"""

import math

import pytest

from vllm_omni.core.sched.policy import LiveRequest, StepCosts
from vllm_omni.core.sched.streams import RequestFields, ScheduledStreams
from vllm_omni.core.step_protocol import ChunkProgress

COSTS = StepCosts(size_s=0.1)


def fields(session: str, chunk: float = 0, **values: object) -> RequestFields:
    return RequestFields(session, chunk, **values)  # type: ignore[arg-type]


def heads(streams: ScheduledStreams) -> list[str]:
    return [request.request_id for request in streams.runnable(())]


def finish(
    streams: ScheduledStreams, name: str, num_steps: int = 2, size: int = 1, now_s: float = 0.0
) -> None:
    streams.mark_stepped(name)
    for step in range(1, num_steps):
        streams.advance(name, ChunkProgress(step, num_steps, size), now_s)
    streams.finish_request(name, now_s)


def test_one_request_of_a_session_at_a_time_by_chunk_index() -> None:
    """A session runs one chunk at a time in index order, and no chunk overtakes a chunk that has
    started.
    """
    streams = ScheduledStreams(10.0)
    for chunk in (2, 1):
        streams.add_request(f"s{chunk}", fields("s", chunk), 0.0)
    streams.add_request("t0", fields("t"), 0.0)
    assert heads(streams) == ["s1", "t0"] and len(streams) == 2
    streams.mark_stepped("s1")
    streams.add_request("s0", fields("s", 0), 0.0)
    assert heads(streams) == ["s1", "t0"], "a started chunk is not overtaken"
    streams.finish_request("s1", 0.0)
    streams.finish_request("s1", 0.0)
    assert sorted(heads(streams)) == ["s0", "t0"]


def test_session_operations_are_due_immediately() -> None:
    streams = ScheduledStreams(10.0)
    streams.add_request("chunk", fields("s", deadline_s=0.5), 100.0)
    streams.add_request("close", RequestFields("t", math.inf, is_chunk=False), 100.0)
    chunk, close = streams.runnable(())
    assert close.deadline_s < chunk.deadline_s and close.size == 0.0


def test_a_closed_stream_no_longer_counts() -> None:
    streams = ScheduledStreams(10.0)
    streams.add_request("s", fields("s", period_s=0.3), 0.0)
    finish(streams, "s")
    streams.add_request("close", RequestFields("s", math.inf, is_chunk=False), 0.1)
    streams.finish_request("close", 0.1)
    assert streams.refusal(fields("new", period_s=0.3), 0.2, COSTS) is None


def test_the_first_level_that_is_in_time_is_chosen() -> None:
    """A chunk runs at the first level at which it meets its deadline.

    The chunk takes 4 x 0.1 s for its steps and 0.3 s for its end. There are three levels; the
    second saves nothing, and the third saves 0.25 s.
    """
    costs = StepCosts(size_s=0.1, last_s=0.3, degraded_last_s=(0.3, 0.05))
    streams = ScheduledStreams(10.0, num_levels=3)
    for index, (deadline_s, level) in enumerate(
        [(5.0, 0), (0.8, 0), (0.65, 2), (0.75, 2), (0.8, 0)]
    ):
        name, now_s = f"s{index}", 10.0 * index
        streams.add_request(name, fields("s", index, deadline_s=deadline_s, period_s=0.75), now_s)
        assert streams.decide_level(name, now_s, streams.runnable(()), costs) == level
        live = streams.get(name)
        assert live is not None and live.level == level
        finish(streams, name, num_steps=4, now_s=now_s)


def test_a_degraded_chunk_counts_at_its_reduced_cost() -> None:
    """When the level of another chunk is chosen, a degraded chunk counts with its reduced cost.

    One chunk takes 0.2 s instead of 0.5 s, so the next one (0.5 s, due in 0.75 s) is not degraded.
    """
    costs = StepCosts(size_s=0.1, last_s=0.3, degraded_last_s=(0.0,))
    streams = ScheduledStreams(10.0, num_levels=2)
    for name in ("n", "s"):
        streams.add_request(f"{name}0", fields(name, 0), 0.0)
        finish(streams, f"{name}0", num_steps=2)
    for name, deadline_s, level in (("n1", 0.35, 1), ("s1", 0.75, 0)):
        streams.add_request(name, fields(name[0], 1, deadline_s=deadline_s), 10.0)
        assert streams.decide_level(name, 10.0, streams.runnable(()), costs) == level


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (None, RequestFields("r", math.inf, is_chunk=False)),
        ({"omni": 3}, RequestFields("r", math.inf, is_chunk=False)),
        ({"omni": {"session_id": 3, "chunk_index": "x"}}, RequestFields("r", math.inf)),
        (
            {"omni": {"session_id": "s", "op": "close"}},
            RequestFields("s", math.inf, is_chunk=False),
        ),
        (
            {"omni": {"session_id": "s", "deadline_s": -1, "chunk_period_s": "1"}},
            RequestFields("s", math.inf),
        ),
        (
            {"omni": {"session_id": "s", "deadline_s": 0, "chunk_period_s": math.inf}},
            RequestFields("s", math.inf),
        ),
        (
            {"omni": {"session_id": "s", "chunk_index": 3, "deadline_s": 1, "chunk_period_s": 0.5}},
            RequestFields("s", 3, deadline_s=1.0, period_s=0.5),
        ),
    ],
)
def test_invalid_request_fields_are_ignored(
    extra: dict[str, object] | None, expected: RequestFields
) -> None:
    """Request fields of the wrong type are ignored, because the runner reports them."""
    assert RequestFields.read_extra_kwargs("r", extra) == expected


def only(streams: ScheduledStreams, name: str) -> LiveRequest:
    live = streams.get(name)
    assert live is not None
    return live


def test_expected_steps_and_size_before_the_first_step() -> None:
    """A request's number of steps and its size are predicted before its first step.

    A chunk with a deadline is expected to have the same steps and size as the stream's last chunk
    at the same level. A chunk without a deadline is expected at full quality. An operation takes
    one step.
    """
    streams = ScheduledStreams(10.0, num_levels=2)
    streams.add_request("s0", fields("s", 0, deadline_s=5.0), 0.0)
    finish(streams, "s0", num_steps=8, size=30)
    streams.add_request("s1", fields("s", 1, deadline_s=0.1), 1.0)
    assert streams.decide_level("s1", 1.0, streams.runnable(()), COSTS) == 1
    finish(streams, "s1", num_steps=3, size=20)
    for name, requested in (
        ("timed", fields("s", 2, deadline_s=1.0)),
        ("patient", fields("s", 3)),
        ("close", RequestFields("s", 4, is_chunk=False, deadline_s=1.0)),
    ):
        streams.add_request(name, requested, 50.0)
    timed, patient, close = (only(streams, name) for name in ("timed", "patient", "close"))
    assert (timed.level, timed.steps_left, timed.size, timed.deadline_s, timed.has_deadline) == (
        1,
        3,
        20.0,
        51.0,
        True,
    )
    assert (patient.level, patient.steps_left, patient.size, patient.has_deadline) == (
        0,
        8,
        20.0,
        False,
    )
    assert (close.level, close.steps_left, close.size, close.deadline_s) == (0, 1, 0.0, 51.0)
    assert [live.order for live in (timed, patient, close)] == [2, 3, 4]
    assert all((live.step, live.started) == (0, False) for live in (timed, patient, close))


def test_progress_updates_steps_and_size() -> None:
    """The worker reports the progress of a chunk. Without a report, one step is subtracted from the
    remaining steps.

    At least one step remains, and sizes are at least one.
    """
    streams = ScheduledStreams(10.0)
    streams.add_request("s0", fields("s"), 0.0)
    live = only(streams, "s0")
    streams.advance("s0", ChunkProgress(2, 6, 0), 1.0)
    assert (live.step, live.steps_left, live.size, live.started) == (2, 4, 1.0, True)
    for left in (3, 2, 1, 1):
        streams.advance("s0", None, 1.0)
        assert live.steps_left == left and live.step == 2
    streams.advance("s0", ChunkProgress(6, 6, 7), 1.0)
    assert (live.step, live.steps_left, live.size) == (6, 1, 7.0)
    streams.mark_stepped("s0")
    assert live.step == 7
    (
        streams.advance("absent", None, 1.0),
        streams.mark_stepped("absent"),
        streams.committed("absent"),
    )
    assert streams.get("absent") is None and streams.may_step("absent")


def test_operations_do_not_change_expected_chunks() -> None:
    streams = ScheduledStreams(10.0)
    streams.add_request("s0", fields("s"), 0.0)
    finish(streams, "s0", num_steps=5, size=9)
    streams.add_request("fork", RequestFields("s", math.inf, is_chunk=False), 0.0)
    streams.add_request("s1", fields("s", 1), 0.0)
    streams.advance("fork", ChunkProgress(1, 77, 77), 0.0)
    streams.finish_request("fork", 0.0)
    streams.add_request("t0", fields("t"), 0.0)
    assert [
        (only(streams, name).steps_left, only(streams, name).size) for name in ("s1", "t0")
    ] == [(5, 9.0)] * 2


def test_a_stream_is_removed_with_its_last_operation() -> None:
    """A stream is retained while a chunk waits for an earlier `reset`, and after a chunk ends. It
    is removed with its last operation.
    """
    streams = ScheduledStreams(10.0)
    streams.add_request("reset", RequestFields("s", 0, is_chunk=False), 0.0)
    streams.add_request("s0", fields("s", 1), 0.0)
    streams.finish_request("reset", 0.0)
    assert set(streams._streams) == {"s"} and heads(streams) == ["s0"]
    streams.finish_request("s0", 0.0)
    assert set(streams._streams) == {"s"} and streams._active == {}
    streams.add_request("close", RequestFields("s", 2, is_chunk=False), 0.0)
    streams.finish_request("close", 0.0)
    assert not streams._streams and not streams._entries and not streams._patient


def test_a_fork_does_not_end_the_stream_of_its_source() -> None:
    """After a fork, the source continues with the steps, size and rate that are known of it, and
    its next chunk does not count as the start of a new stream.
    """
    streams = ScheduledStreams(10.0)
    streams.add_request("s0", fields("s", period_s=0.1), 0.0)
    finish(streams, "s0", num_steps=5, size=9)
    streams.add_request("t0", fields("t"), 0.0)
    finish(streams, "t0", num_steps=2, size=1)
    fork = RequestFields.read_extra_kwargs("fork", {"omni": {"session_id": "s", "op": "fork"}})
    streams.add_request("fork", fork, 0.0)
    streams.finish_request("fork", 0.0)
    assert streams.refusal(fields("s", math.inf, period_s=0.1), 0.0, COSTS) is None
    streams.add_request("s1", fields("s", 1), 0.0)
    assert (only(streams, "s1").steps_left, only(streams, "s1").size) == (5, 9.0)


def test_the_least_recently_used_stream_is_evicted() -> None:
    """At the limit, a new stream replaces the least recently used stream that has no waiting
    request.
    """
    streams = ScheduledStreams(10.0)
    for number in range(4096):
        streams.add_request(str(number), fields(f"s{number}"), 0.0)
        if number:
            finish(streams, str(number))
    streams.add_request("again", fields("s1", 1), 0.0)
    streams.finish_request("again", 0.0)
    streams.add_request("one more", fields("new"), 0.0)
    assert len(streams._streams) == 4097 and "s0" in streams._streams, "the oldest one waits"
    streams.finish_request("0", 0.0)
    streams.add_request("another", fields("newer"), 0.0)
    assert len(streams._streams) == 4096 and "s1" in streams._streams
    assert not {"s0", "s2"} & set(streams._streams)


def test_steps_without_a_deadline_are_due_one_after_the_other() -> None:
    """Steps without a deadline are due one after another, counted from the last such step or from
    the first arrival.

    Requests with a deadline do not affect the due times of other requests.
    """
    streams = ScheduledStreams(2.0)
    streams.add_request("a", fields("a"), 100.0)
    streams.add_request("b", fields("b"), 105.0)
    streams.add_request("timed", fields("c", deadline_s=1.0), 106.0)
    streams.advance("timed", ChunkProgress(1, 4, 1), 107.0)
    streams.runnable(())
    assert [only(streams, name).deadline_s for name in ("a", "b", "timed")] == [102.0, 104.0, 107.0]
    streams.advance("b", None, 110.0)
    streams.runnable(())
    assert [only(streams, name).deadline_s for name in "ba"] == [112.0, 114.0]
    assert [request.request_id for request in streams.runnable({"b"})] == ["a", "timed"]
    assert only(streams, "a").deadline_s == 112.0, "requests in flight do not count"
    for name in "ab":
        streams.finish_request(name, 111.0)
    streams.add_request("d", fields("d"), 200.0)
    streams.runnable(())
    assert only(streams, "d").deadline_s == 202.0


@pytest.mark.parametrize(
    ("period_s", "silent_s", "live"),
    [(0.25, 1.0, True), (0.25, 1.01, False), (0.5, 1.5, True), (0.5, 1.51, False)],
)
def test_a_stream_counts_for_three_of_its_periods_and_at_least_a_second(
    period_s: float, silent_s: float, live: bool
) -> None:
    """A stream counts as live for three of its periods, and at least a second, after its last
    result.

    A stream with a waiting chunk always counts as live.
    """
    streams = ScheduledStreams(10.0)
    streams.add_request("s0", fields("s", period_s=period_s), 0.0)
    new = fields("new", math.inf, period_s=0.15)
    finish(streams, "s0", now_s=100.0)
    assert (streams.refusal(new, 100.0 + silent_s, StepCosts(size_s=0.07)) is not None) == live
    streams.add_request("s1", fields("s", 1), 100.5)
    assert streams.refusal(new, 900.0, StepCosts(size_s=0.07)) is not None


@pytest.mark.parametrize(
    ("requested", "refused"),
    [
        (fields("new", 0, period_s=0.1), True),
        (fields("new", math.inf, period_s=0.1), True),
        (fields("new", 1, period_s=0.1), False),
        (fields("new", 0), False),
        (fields("s", 0, period_s=0.1), False),
        (RequestFields("new", math.inf, is_chunk=False, period_s=0.1), False),
    ],
)
def test_requests_that_start_a_stream(requested: RequestFields, refused: bool) -> None:
    """A request starts a stream if its session is unknown, it has a rate, and it is a first chunk
    or has no index.
    """
    streams = ScheduledStreams(10.0)
    streams.add_request("s0", fields("s"), 0.0)
    finish(streams, "s0", num_steps=2)
    assert (streams.refusal(requested, 0.0, COSTS) is not None) == refused


def test_a_short_first_chunk_does_not_make_later_chunks_look_short() -> None:
    """The first chunk of a session may have fewer steps than later ones. Once a later chunk has
    been observed, the first chunks of other sessions no longer lower the estimate.
    """
    streams = ScheduledStreams(10.0)
    for name, num_steps in (("a0", 2), ("a1", 5), ("b0", 2)):
        streams.add_request(name, fields(name[0], int(name[1])), 0.0)
        finish(streams, name, num_steps=num_steps)
    for name in ("b1", "c0"):
        streams.add_request(name, fields(name[0], int(name[1])), 1.0)
        live = streams.get(name)
        assert live is not None and live.steps_left == 5


def test_refusals_assume_full_quality() -> None:
    """The scheduler uses the costs at full quality to decide whether to refuse a stream, so a
    cheaper level adds no capacity. Until costs have been measured, every stream is accepted.
    """
    streams = ScheduledStreams(10.0, num_levels=2)
    new = fields("new", period_s=0.05)
    assert streams.refusal(new, 0.0, StepCosts(size_s=100.0)) is None
    streams.add_request("s0", fields("s", deadline_s=9.0), 0.0)
    finish(streams, "s0", num_steps=8)
    streams._typical.steps[1] = 1
    assert streams.refusal(fields("new", period_s=0.5), 0.0, COSTS) is not None
    assert streams.refusal(fields("new", period_s=0.9), 0.0, COSTS) is None
