# SPDX-License-Identifier: Apache-2.0
"""`StreamBatchScheduler` with `omni.scheduling` "deadline": vLLM runs the batch that the scheduling
policy chooses.
"""

from pathlib import Path
from typing import Any

import pytest
from helpers.waits import exactly
from scheduler_harness import Harness
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm_omni.core.sched.policy import StepCosts
from vllm_omni.core.step_protocol import SchedulerNote


def harness(model: Path, costs: StepCosts = StepCosts(size_s=0.2), **omni: Any) -> Harness:  # noqa: B008 (frozen)
    """Return a harness with the given step costs. A request is assumed to have size 1 until the
    worker reports its size.
    """
    made = Harness(model, scheduling="deadline", **omni)
    made.scheduler._cost_model.costs = costs
    made.scheduler._cost_model.observe = lambda *args: None  # type: ignore[method-assign]
    return made


def note(run: Harness, name: str) -> SchedulerNote:
    params = run.scheduler.requests[name].pooling_params
    assert params is not None
    return SchedulerNote.read_extra_kwargs(params.extra_kwargs)


def test_an_urgent_request_runs_first(null_world: Path) -> None:
    """An urgent request that arrives last runs first; the other requests continue afterwards."""
    run = harness(null_world)
    run.add("a", "a", deadline_s=60.0)
    assert run.step() == ["a"]
    run.add("b", "b", deadline_s=60.0)
    run.add("urgent", "u", deadline_s=0.3)
    assert run.step() == ["urgent"]
    assert run.step(done=["urgent"]) == ["urgent"]
    assert run.step() == ["a", "b"]
    assert run.step(done="ab") == ["a", "b"]
    assert not run.scheduler.has_unfinished_requests()


def test_requests_outside_the_batch_keep_their_order(null_world: Path) -> None:
    """Requests outside the batch keep their order: running requests stay running, and new requests
    stay waiting.
    """
    run = harness(null_world, max_requests_per_step=1)
    for number, name in enumerate("abc"):
        run.add(name, name, deadline_s=60.0 - number)
    order = [run.step()[0]]
    run.add("d", "d", deadline_s=1.0)
    order += [run.step()[0], run.step(done="d")[0]]
    order += [run.step(done=name)[0] for name in "cba"]
    assert order == ["c", "d", "d", "c", "b", "a"]


def test_an_abort_while_the_step_is_in_flight(null_world: Path) -> None:
    """A request can be aborted while its step is in flight, even if a second batch is in flight
    too, as with two pipeline stages.
    """
    run = harness(null_world, stages=2)
    run.add("a", "a", deadline_s=60.0)
    run.add("b", "b", deadline_s=60.0)
    (first, output), (second, other) = run.schedule(), run.schedule()
    assert (first, second) == (["a"], ["b"])
    run.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    run.response(output)
    run.response(other)
    assert run.step(done="b") == ["b"]
    assert not run.scheduler._in_flight and not run.scheduler._launched


def test_more_sessions_than_vllm_may_run(null_world: Path) -> None:
    """When all of vLLM's running slots are taken, an urgent request waits and the running requests
    continue.
    """
    run = harness(null_world, max_requests_per_step=2)
    run.scheduler.max_num_active_reqs = 2
    run.add("a", "a", deadline_s=60.0)
    run.add("b", "b", deadline_s=61.0)
    assert run.step() == ["a", "b"]
    run.add("urgent", "u", deadline_s=0.1)
    assert run.step(done="a") == ["a", "b"]
    assert "urgent" in run.step()


def test_a_pause_lets_running_requests_end(null_world: Path) -> None:
    """In the `PAUSED_NEW` state, running requests continue and no new request starts, not even a
    more urgent one.
    """
    run = harness(null_world)
    run.add("a", "a", deadline_s=60.0)
    run.step()
    run.add("urgent", "u", deadline_s=0.1)
    run.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert [run.step(), run.step(done="a"), run.step()] == [["a"], ["a"], []]
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert run.step() == ["urgent"]


def test_a_refused_stream_receives_a_note_and_ends(null_world: Path) -> None:
    """A refused stream's request is scheduled once so that the runner returns the error. The
    session is then removed together with the request.
    """
    run = harness(null_world, target_fps=16)
    run.add("s0", "s", 0, deadline_s=60.0, chunk_period_s=0.5)
    _, output = run.schedule()
    run.response(output, progress={"s0": (1, 2, 1)})
    run.add("t0", "t", 0, deadline_s=0.5, chunk_period_s=0.5)
    assert "live streams" in str(note(run, "t0").refused) and note(run, "s0").refused is None
    assert "t0" in run.step(done=["t0"])
    run.add("u0", "u", 0)
    assert note(run, "u0").refused is None


@pytest.mark.parametrize("ended", ["done", "denoised"])
def test_a_stream_between_chunks_counts_for_refusals(null_world: Path, ended: str) -> None:
    """A live stream between two chunks still counts towards the load when the scheduler decides
    whether to refuse a new stream, because its next chunk is expected.

    Two streams that are refused in the same step both receive errors and are removed.
    """
    run = harness(null_world, target_fps=16)
    run.add("s0", "s", 0, deadline_s=60.0, chunk_period_s=0.5)
    _, output = run.schedule()
    run.response(output, progress={"s0": (1, 3, 1)})
    run.step(**{ended: ["s0"]})
    for name in "tu":
        run.add(f"{name}0", name, 0, deadline_s=0.5, chunk_period_s=0.5)
        assert "live streams" in str(note(run, f"{name}0").refused)
    assert {"t0", "u0"} <= set(run.step(done=["s0", "t0", "u0"]))
    assert set(run.scheduler._streams._streams) == {"s"}


def test_a_chunk_that_would_be_late_is_degraded(null_world: Path) -> None:
    run = harness(null_world, degradations=["fewer_steps"])
    run.add("s0", "s", 0, deadline_s=60.0)
    _, output = run.schedule()
    assert note(run, "s0").degradations == []
    run.response(output, progress={"s0": (1, 5, 1)})
    run.step(done=["s0"])
    run.add("s1", "s", 1, deadline_s=0.5)
    run.step(done=["s1"])
    assert note_of_last(run) == ["fewer_steps"]


def test_the_cost_of_the_end_of_a_chunk_is_measured_per_level(null_world: Path) -> None:
    """For each degradation level, the cost model receives the sizes of the chunks that ended at
    this level or above.

    Chunk 0 runs at full quality and counts towards neither level. Chunk 1 counts towards both
    levels.
    """
    run = harness(null_world, degradations=["fewer_steps", "tiny_vae"])
    reported: list[tuple[float, ...]] = []
    run.scheduler._cost_model.observe = lambda total, first, last, _, more: reported.append(
        (last, *more)
    )  # type: ignore[method-assign]
    for index, deadline_s in ((0, 60.0), (1, 0.05)):
        name = f"s{index}"
        run.add(name, "s", index, deadline_s=deadline_s)
        _, output = run.schedule()
        run.response(output, progress={name: (1, 2, 64)})
        run.step(done=[name])
    assert reported == [(0.0, 0.0, 0.0), (64.0, 0.0, 0.0), (0.0, 0.0, 0.0), (64.0, 64.0, 64.0)]


DEFAULT_COSTS = StepCosts()


def observed(
    model: Path, costs: StepCosts = DEFAULT_COSTS, **omni: Any
) -> tuple[Harness, list[tuple[Any, ...]]]:
    """Return a harness and the list of calls to its cost model.

    Each call states the size of a batch, the sizes of the chunks that start and end in it, and its
    duration.
    """
    run, reported = harness(model, costs, **omni), []
    run.scheduler._cost_model.observe = lambda *args: reported.append(args)  # type: ignore[method-assign, func-returns-value]
    return run, reported


def test_sizes_of_started_and_ended_chunks_are_measured(null_world: Path) -> None:
    """A chunk counts as ended after its last denoise step, although its result is still pending."""
    run, reported = observed(null_world)
    run.add("a", "a", deadline_s=60.0)
    _, output = run.schedule()
    run.response(output, progress={"a": (1, 2, 64)})
    run.step(denoised=["a"])
    run.step(done=["a"])
    assert [args[:3] for args in reported] == [(64.0, 64.0, 0), (64.0, 0, 64.0), (0, 0, 0)]


def test_steps_of_a_stock_worker_are_measured(null_world: Path) -> None:
    """A stock worker's steps are timed by the wall clock, and a request counts as ended once the
    engine has removed it.
    """
    run, reported = observed(null_world)
    run.add("a", "a", deadline_s=60.0)
    for done in ((), ("a",)):
        run.stock_response(run.schedule()[1], done)
    assert [args[:3] for args in reported] == [(1.0, 1.0, 0), (1.0, 0, 1.0)]


def test_device_times_are_matched_to_earlier_steps(null_world: Path) -> None:
    """The sizes of a batch are stored until its duration arrives with the output of a later
    step.
    """
    run, reported = observed(null_world, degradations=["fewer_steps"])
    run.add("a", "a", deadline_s=60.0)
    _, output = run.schedule()
    run.response(output, progress={"a": (1, 3, 64)}, unfinished=True)
    assert reported == []
    _, output = run.schedule()
    run.response(output, done=["a"], before_s=0.25, unfinished=True)
    run.add("b", "b", deadline_s=60.0)
    _, output = run.schedule()
    run.response(output, progress={"b": (1, 3, 64)}, before_s=0.5, unfinished=True)
    assert reported == [(64.0, 64.0, 0, 0.25, [0]), (64.0, 0, 64.0, 0.5, [0])]


@pytest.mark.parametrize(("unfinished", "own_s"), [(True, 0.1 + 0.2 * 3 + 0.01 * 3), (False, 0.0)])
def test_the_end_of_the_running_step_is_predicted(
    null_world: Path, unfinished: bool, own_s: float
) -> None:
    """If the host is ahead of the device, the end of the running step is predicted from the sizes
    of its batch.

    In this test, the batch contains three new requests.
    """
    run, _ = observed(null_world, StepCosts(step_s=0.1, size_s=0.2, first_s=0.01, last_s=0.05))
    for name in "abc":
        run.add(name, name, deadline_s=60.0)
    _, output = run.schedule()
    run.response(output, progress=dict.fromkeys("abc", (1, 2, 1)), unfinished=unfinished)
    scheduler = run.scheduler
    assert scheduler._device_free_s - scheduler._last_end_s == pytest.approx(own_s)
    _, output = run.schedule()
    run.response(output, done="abc", unfinished=unfinished)
    ended_s = 0.1 + 0.2 * 3 + 0.05 * 3 if unfinished else 0.0
    assert scheduler._device_free_s - scheduler._last_end_s == pytest.approx(ended_s)


def note_of_last(run: Harness) -> list[str]:
    """Return the degradations in the scheduler's note on the new request in the last batch."""
    assert run.last is not None
    params = run.last.scheduled_new_reqs[0].pooling_params
    assert params is not None
    return SchedulerNote.read_extra_kwargs(params.extra_kwargs).degradations


def test_a_client_cannot_forge_the_note(null_world: Path) -> None:
    run = harness(null_world)
    run.add(
        "a", "a", extra={"omni_scheduler": {"refused": "mine", "degradations": ["fewer_steps"]}}
    )
    assert note(run, "a") == SchedulerNote()


def test_step_costs_are_measured(null_world: Path) -> None:
    """After ten steps of 10 ms, the measured cost of a step is correct to within the machine's
    timing jitter.
    """
    run = Harness(null_world, scheduling="deadline")
    run.add("a", "a", deadline_s=60.0)
    for step in range(1, 11):
        _, output = run.schedule()
        exactly(0.01)
        run.response(output, progress={"a": (step, 20, 500)})
    assert 0.01 <= run.scheduler._cost_model.costs.of_chunk(1, 500.0, started=True) < 0.05
