# SPDX-License-Identifier: Apache-2.0
"""StreamBatchScheduler under omni.scheduling 'deadline': the policy's batch is what stock vLLM
then runs.
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
    """With given instead of measured costs; a size is 1 until a worker says otherwise."""
    made = Harness(model, scheduling="deadline", **omni)
    made.scheduler._cost_model.costs = costs
    made.scheduler._cost_model.observe = lambda *args: None  # type: ignore[method-assign]
    return made


def note(run: Harness, name: str) -> SchedulerNote:
    params = run.scheduler.requests[name].pooling_params
    assert params is not None
    return SchedulerNote.read_extra_kwargs(params.extra_kwargs)


def test_the_urgent_one_goes_first_and_alone_if_it_must(null_world: Path) -> None:
    """Arrived last; as soon as it is done the others go on, with nothing lost."""
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


def test_with_time_to_spare_the_batch_is_as_large_as_allowed(null_world: Path) -> None:
    run = harness(null_world, max_requests_per_step=3)
    for name in "abcd":
        run.add(name, name, deadline_s=60.0)
    assert run.step() == ["a", "b", "c"]


def test_what_waits_behind_the_batch_is_not_lost(null_world: Path) -> None:
    """A running request that is left out stays running, an unstarted one stays waiting, both in
    their order.
    """
    run = harness(null_world, max_requests_per_step=1)
    for number, name in enumerate("abc"):
        run.add(name, name, deadline_s=60.0 - number)
    order = [run.step()[0]]
    run.add("d", "d", deadline_s=1.0)
    order += [run.step()[0], run.step(done="d")[0]]
    order += [run.step(done=name)[0] for name in "cba"]
    assert order == ["c", "d", "d", "c", "b", "a"]


def test_a_session_waits_for_its_own_earlier_chunk_however_urgent_the_next(
    null_world: Path,
) -> None:
    run = harness(null_world)
    run.add("s0", "s", 0, deadline_s=60.0)
    run.add("s1", "s", 1, deadline_s=0.1)
    assert [run.step(), run.step(done=["s0"]), run.step()] == [["s0"], ["s0"], ["s1"]]


def test_a_result_on_its_way_is_fetched_with_whatever_runs(null_world: Path) -> None:
    run = harness(null_world, max_requests_per_step=1)
    run.add("a", "a", deadline_s=60.0)
    run.add("b", "b", deadline_s=50.0)
    assert run.step(denoised=["b"]) == ["b"]
    assert sorted(run.step(done=["b"])) == ["a", "b"]


@pytest.mark.parametrize("aborted", ["urgent", "a"])
def test_an_abort_frees_the_place(null_world: Path, aborted: str) -> None:
    run = harness(null_world)
    run.add("a", "a", deadline_s=60.0)
    run.add("urgent", "u", deadline_s=0.1)
    assert run.step() == ["urgent"]
    run.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
    left = "a" if aborted == "urgent" else "urgent"
    assert run.step(done=[left]) == [left]
    assert not run.scheduler.has_unfinished_requests() and not len(run.scheduler._streams)


def test_an_abort_while_the_step_is_in_flight(null_world: Path) -> None:
    """With two batches in flight, as with two pipeline stages."""
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
    """With every running slot taken, an urgent newcomer waits, and nothing stands still."""
    run = harness(null_world, max_requests_per_step=2)
    run.scheduler.max_num_active_reqs = 2
    run.add("a", "a", deadline_s=60.0)
    run.add("b", "b", deadline_s=61.0)
    assert run.step() == ["a", "b"]
    run.add("urgent", "u", deadline_s=0.1)
    assert run.step(done="a") == ["a", "b"]
    assert "urgent" in run.step()


def test_of_two_newcomers_the_urgent_one_gets_the_last_place(null_world: Path) -> None:
    """Of those that may run, one place is free: arrival does not decide."""
    run = harness(null_world, StepCosts())
    run.scheduler.max_num_active_reqs = 2
    run.add("a", "a", deadline_s=60.0)
    run.step()
    run.add("patient", "p", deadline_s=60.0)
    run.add("urgent", "u", deadline_s=5.0)
    assert sorted(run.step()) == ["a", "urgent"]


def test_a_pause_lets_what_runs_come_to_its_end(null_world: Path) -> None:
    """`PAUSED_NEW`: nothing new starts, the running one is not held up by a more urgent
    newcomer.
    """
    run = harness(null_world)
    run.add("a", "a", deadline_s=60.0)
    run.step()
    run.add("urgent", "u", deadline_s=0.1)
    run.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert [run.step(), run.step(done="a"), run.step()] == [["a"], ["a"], []]
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert run.step() == ["urgent"]


def test_a_stream_that_cannot_be_held_gets_a_note_and_ends_at_once(null_world: Path) -> None:
    """It takes a place in one batch, for its answer; its session is forgotten with it."""
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
def test_a_stream_whose_chunk_has_just_ended_still_counts(null_world: Path, ended: str) -> None:
    """Its next chunk is about to come; two that are refused together are answered together, and
    forgotten.
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


def test_a_chunk_that_would_be_late_is_notified_to_do_with_less(null_world: Path) -> None:
    run = harness(null_world, degradations=["fewer_steps"])
    run.add("s0", "s", 0, deadline_s=60.0)
    _, output = run.schedule()
    assert note(run, "s0").degradations == []
    run.response(output, progress={"s0": (1, 5, 1)})
    run.step(done=["s0"])
    run.add("s1", "s", 1, deadline_s=0.5)
    run.step(done=["s1"])
    assert note_of_last(run) == ["fewer_steps"]


def test_what_a_level_saves_at_a_chunks_end_is_measured(null_world: Path) -> None:
    """The model is told which sizes ended at which level at least: chunk 0 at none, chunk 1 at
    both.
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
    """A harness, and what its cost model is told: sizes of a batch, of those that begin and end
    in it, its seconds.
    """
    run, reported = harness(model, costs, **omni), []
    run.scheduler._cost_model.observe = lambda *args: reported.append(args)  # type: ignore[method-assign, func-returns-value]
    return run, reported


def test_who_starts_and_who_ends_is_measured(null_world: Path) -> None:
    """A chunk ends with its last step, although its result is still on its way."""
    run, reported = observed(null_world)
    run.add("a", "a", deadline_s=60.0)
    _, output = run.schedule()
    run.response(output, progress={"a": (1, 2, 64)})
    run.step(denoised=["a"])
    run.step(done=["a"])
    assert [args[:3] for args in reported] == [(64.0, 64.0, 0), (64.0, 0, 64.0), (0, 0, 0)]


def test_steps_of_a_stock_worker_are_measured(null_world: Path) -> None:
    """By the clock; a request has ended if the engine knows it no more."""
    run, reported = observed(null_world)
    run.add("a", "a", deadline_s=60.0)
    for done in ((), ("a",)):
        run.stock_response(run.schedule()[1], done)
    assert [args[:3] for args in reported] == [(1.0, 1.0, 0), (1.0, 0, 1.0)]


def test_a_host_that_is_ahead_reports_the_device_time_of_the_step_before(null_world: Path) -> None:
    """Sizes of a batch wait for its time, which comes with the next answer; until then nothing
    is measured.
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
def test_the_device_is_free_when_the_step_it_is_at_has_ended(
    null_world: Path, unfinished: bool, own_s: float
) -> None:
    """Predicted from the batch's sizes if the host is ahead: here three requests of size 1 that
    begin.
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
    """The note of the request that was new in the last batch."""
    assert run.last is not None
    params = run.last.scheduled_new_reqs[0].pooling_params
    assert params is not None
    return SchedulerNote.read_extra_kwargs(params.extra_kwargs).degradations


def test_a_client_cannot_write_the_note(null_world: Path) -> None:
    run = harness(null_world)
    run.add(
        "a", "a", extra={"omni_scheduler": {"refused": "mine", "degradations": ["fewer_steps"]}}
    )
    assert note(run, "a") == SchedulerNote()


def test_step_costs_are_measured(null_world: Path) -> None:
    """A worker whose steps take 10 ms: known after ten steps, within the jitter of this machine."""
    run = Harness(null_world, scheduling="deadline")
    run.add("a", "a", deadline_s=60.0)
    for step in range(1, 11):
        _, output = run.schedule()
        exactly(0.01)
        run.response(output, progress={"a": (step, 20, 500)})
    assert 0.01 <= run.scheduler._cost_model.costs.of_chunk(1, 500.0, started=True) < 0.05
