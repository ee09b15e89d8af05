# SPDX-License-Identifier: Apache-2.0
"""The diffusion runner on the null world, with scheduler outputs built by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step
from vllm.sequence import IntermediateTensors

from vllm_omni.outputs import RequestFailed

STEPS = 5


@pytest.fixture
def runner(make_runner: Any, null_world: Path) -> Any:
    return make_runner(null_world)


def chunk(request_id: str, session: str, index: int, **fields: Any) -> Any:
    prompt = "a field" if index == 0 else None
    return new_request(
        request_id, session_id=session, chunk_index=index, prompt=prompt, output="latents", **fields
    )


def state_of(runner: Any, session_id: str) -> tuple[Any, dict[str, bytes]]:
    session = runner.sessions.get(session_id)
    return session.scalars(), {
        name: t.cpu().numpy().tobytes() for name, t in session.tensors().items()
    }


def latents(result: Any) -> torch.Tensor:
    return result[1]["latents"]


def test_a_request_takes_one_engine_step_per_denoise_step(runner: Any) -> None:
    """A request takes one engine step per denoise step. Only the last engine step returns an
    envelope, which contains metadata and timings.
    """
    results = [execute(runner, step(new=[chunk("r", "s", 0)]))]
    results += [execute(runner, step(running=["r"])) for _ in range(STEPS - 1)]
    assert [result["r"] for result in results[:-1]] == [None] * (STEPS - 1)
    meta, tensors = results[-1]["r"]
    assert (meta["session_id"], meta["chunk_index"], meta["num_frames"]) == ("s", 0, 9)
    assert {name: len(times) for name, times in meta["timings_ms"].items()} == {
        "encode": 1,
        "steps": STEPS,
        "decode": 1,
        "total": 1,
    }
    assert tensors["latents"].shape == (4, 4, 6)


def test_a_window_is_refused_if_the_model_fixes_it(runner: Any) -> None:
    """If the model has a fixed window, a request for another window is refused without opening a
    session.
    """
    [result] = execute(runner, step(new=[chunk("r", "s", 0, window_frames=3)])).values()
    assert isinstance(result, RequestFailed) and result.code == "invalid_request"
    assert "window_frames and sink_frames are fixed by this server" in str(result)
    assert "s" not in runner.sessions


def test_requests_at_different_steps_share_a_step_and_equal_solo_runs(
    runner: Any, make_runner: Any, null_world: Path
) -> None:
    """A request that arrives two steps later joins the running batch. Both results equal those
    obtained when each request runs by itself.
    """
    execute(runner, step(new=[chunk("a", "a", 0, seed=1)]))
    execute(runner, step(running=["a"]))
    results: dict[str, Any] = {}
    outcome = execute(runner, step(new=[chunk("b", "b", 0, seed=2)], running=["a"]))
    while len(results) < 2:
        results.update({k: v for k, v in outcome.items() if v is not None})
        outcome = execute(runner, step(running=[k for k in ("a", "b") if k not in results]))
    solo = make_runner(null_world)
    for name, seed in (("a", 1), ("b", 2)):
        alone = run_to_end(solo, chunk(name, name, 0, seed=seed))[name]
        assert torch.equal(latents(alone), latents(results[name]))


def test_an_aborted_chunk_leaves_its_session_byte_identical(runner: Any) -> None:
    """After an abort in any step, the session is byte-identical to its state before the chunk, and
    the client can request the same chunk again.
    """
    run_to_end(runner, chunk("r0", "s", 0))
    before = state_of(runner, "s")
    reference = None
    for aborted_after in range(1, STEPS):
        name = f"r{aborted_after}"
        execute(runner, step(new=[chunk(name, "s", 1)]))
        for _ in range(aborted_after - 1):
            execute(runner, step(running=[name]))
        execute(runner, step(finished=[name]))
        assert state_of(runner, "s") == before
    reference = run_to_end(runner, chunk("again", "s", 1))["again"]
    assert reference[0]["chunk_index"] == 1
    assert state_of(runner, "s") != before


def test_finishing_an_unknown_request_has_no_effect(runner: Any) -> None:
    """If the scheduler reports an unknown request as finished, the runner ignores it."""
    execute(runner, step(new=[chunk("r", "s", 0)]))
    execute(runner, step(finished=["aborted while it waited"], running=["r"]))
    assert runner.request_progress() == {"s": [2, STEPS]}


def test_a_snapshot_first_applies_results_of_finished_chunks(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a snapshot, the runner receives only the results of the session's finished chunks.

    The runner does not receive results for other sessions, running chunks or requests without a
    chunk.
    """
    runner = make_runner(null_world, {"overlap_decode": True})
    execute(
        runner, step(new=[chunk("done", "s", 0), chunk("other", "t", 0), chunk("broken", "s", 7)])
    )
    for _ in range(STEPS - 1):
        execute(runner, step(running=["done", "other"]))
    execute(runner, step(new=[chunk("at work", "s", 1)]))
    assert runner.requests["done"].done
    assert runner.requests["broken"].chunk is None
    requested: list[list[str]] = []
    monkeypatch.setattr(runner.role, "receive_results", requested.append)
    runner.settle("s")
    assert requested == [["done"]]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"fail_in": "prepare"}, "engine_error"),
        ({"fail_in": "denoise", "fail_at": 3}, "engine_error"),
        ({"fail_in": "decode"}, "engine_error"),
        ({"nan_at": STEPS - 1}, "non_finite"),
        ({"stepz": 1}, "invalid_request"),
    ],
)
def test_a_failed_request_affects_no_other(
    runner: Any, make_runner: Any, null_world: Path, options: dict[str, Any], code: str
) -> None:
    """A failed request affects no other request: another request in the same batch produces the
    same result as when it runs by itself.

    The failed request's session is unchanged. The error does not reveal the message of an
    unexpected exception.
    """
    run_to_end(runner, chunk("bad0", "bad", 0), chunk("good0", "good", 0))
    before = state_of(runner, "bad")
    results = run_to_end(
        runner, chunk("bad1", "bad", 1, options=options), chunk("good1", "good", 1)
    )
    assert isinstance(results["bad1"], RequestFailed) and results["bad1"].code == code
    assert "injected" not in str(results["bad1"])
    assert state_of(runner, "bad") == before
    solo = make_runner(null_world)
    run_to_end(solo, chunk("good0", "good", 0))
    assert torch.equal(
        latents(run_to_end(solo, chunk("good1", "good", 1))["good1"]), latents(results["good1"])
    )


def test_a_chunk_out_of_order_is_refused(runner: Any) -> None:
    """A chunk that arrives out of order is refused, and the error states the received and the
    expected index.
    """
    run_to_end(runner, chunk("r0", "s", 0))
    failure = run_to_end(runner, chunk("r5", "s", 5))["r5"]
    assert (
        failure.code == "out_of_order" and "5" in failure.message and "expects 1" in failure.message
    )


def test_a_malformed_request_is_refused(runner: Any) -> None:
    """A request with missing keys, wrong types or unknown fields fails with `invalid_request`, and
    the engine continues running.
    """
    for extra in (
        None,
        {},
        {"omni": 3},
        {"omni": {"session_id": "../x"}},
        {"omni": {"session_id": "a", "nope": 1}},
    ):
        data = chunk("r", "s", 0)
        data.pooling_params.extra_kwargs = extra
        failure = execute(runner, step(new=[data]))["r"]
        assert isinstance(failure, RequestFailed) and failure.code == "invalid_request"
        execute(runner, step(finished=["r"]))


def test_session_operations(runner: Any) -> None:
    """`fork` copies a session, and the copy can then diverge. `reset` restarts a session under the
    same id, and `close` frees it. Operations on unknown sessions fail with `unknown_session`.
    """
    run_to_end(runner, chunk("r0", "s", 0))
    forked = run_to_end(runner, new_request("f", session_id="s", op="fork", fork_to="t"))["f"]
    assert forked[0]["session_id"] == "t" and runner.sessions.get("t").chunk_index == 1
    same = [run_to_end(runner, chunk(f"{name}1", name, 1))[f"{name}1"] for name in ("s", "t")]
    assert torch.equal(latents(same[0]), latents(same[1]))
    poses = torch.eye(4).repeat(12, 1, 1) * 3
    turned = new_request("t2", {"poses": poses}, session_id="t", chunk_index=2, output="latents")
    diverged = run_to_end(runner, turned, chunk("s2", "s", 2))
    assert not torch.equal(latents(diverged["t2"]), latents(diverged["s2"]))

    assert run_to_end(runner, new_request("x", session_id="s", op="reset"))["x"][0]["existed"]
    assert run_to_end(runner, chunk("again", "s", 0))["again"][0]["chunk_index"] == 0
    assert run_to_end(runner, new_request("c", session_id="s", op="close"))["c"][0]["existed"]
    assert not run_to_end(runner, new_request("d", session_id="s", op="close"))["d"][0]["existed"]
    failure = run_to_end(runner, new_request("g", session_id="s", op="fork", fork_to="u"))["g"]
    assert failure.code == "unknown_session"


def test_a_full_server_refuses_new_sessions(make_runner: Any, null_world: Path) -> None:
    """A request that would exceed the session limit fails with `capacity`, and no active session is
    evicted to make room.
    """
    runner = make_runner(null_world, {"max_sessions": 2})
    run_to_end(runner, chunk("a", "a", 0), chunk("b", "b", 0))
    failure = run_to_end(runner, chunk("c", "c", 0))["c"]
    assert failure.code == "capacity" and "a" in runner.sessions and "b" in runner.sessions
    run_to_end(runner, new_request("x", session_id="a", op="close"))
    assert run_to_end(runner, chunk("c2", "c", 0))["c2"][0]["chunk_index"] == 0


def test_sessions_are_bounded_in_bytes(make_runner: Any, null_world: Path) -> None:
    """`omni.max_session_bytes` limits the memory that sessions use. A limit below the size of one
    session is refused at startup.
    """
    one = 4 * 4 * 6 * 4
    runner = make_runner(null_world, {"max_session_bytes": one})
    run_to_end(runner, chunk("a", "a", 0))
    assert run_to_end(runner, chunk("b", "b", 0))["b"].code == "capacity"
    with pytest.raises(ValueError, match="one session of the largest shape"):
        make_runner(null_world, {"max_session_bytes": one - 1})


def test_the_stock_scheduler_gets_whole_chunks(
    make_runner: Any, null_world: Path, runner: Any
) -> None:
    """Without `StreamBatchScheduler`, one engine step generates a whole chunk. The results equal
    those of step-by-step generation.
    """
    stock = make_runner(null_world, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    result = execute(stock, step(new=[chunk("r", "s", 0), chunk("q", "s", 1)]))
    assert result["r"][0]["chunk_index"] == 0 and result["q"][0]["chunk_index"] == 1
    stepped = run_to_end(runner, chunk("r", "s", 0))["r"]
    assert torch.equal(latents(stepped), latents(result["r"]))


def test_a_stage_passes_tensors_from_the_previous_one_to_the_next(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role receives the previous stage's tensors, and the tensors that the role returns are sent
    to the next stage.
    """
    received, sent, seen = IntermediateTensors({}), IntermediateTensors({}), []

    def pass_on(states: Any, tensors: Any) -> IntermediateTensors:
        seen.append(([state.request_id for state in states], tensors))
        return sent

    monkeypatch.setattr(runner.role, "step", pass_on)
    assert runner.execute_model(step(new=[chunk("r", "s", 0)]), received) is sent
    assert seen == [(["r"], received)]


def test_input_tensors_reach_the_model_by_name(runner: Any) -> None:
    """Input tensors are passed to the model by name. The test checks that the model refuses a NaN
    pose with its own error code.
    """
    poses = torch.full((9, 4, 4), float("nan"))
    data = new_request("r", {"poses": poses}, session_id="s", prompt="x", chunk_index=0)
    assert run_to_end(runner, data)["r"].code == "non_finite_pose"


@pytest.mark.parametrize(("batch_invariant", "sizes"), [(True, [1, 1]), (False, [2])])
def test_batch_invariance_decides_how_forwards_are_shared(
    make_runner: Any,
    null_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_invariant: bool,
    sizes: list[int],
) -> None:
    """With `batch_invariant` (the default), every request has its own forward pass.

    Without `batch_invariant`, requests of the same shape share a forward pass.
    """
    runner = make_runner(null_world, {"batch_invariant": batch_invariant})
    seen: list[int] = []
    forward = runner.model.denoise_step
    monkeypatch.setattr(
        runner.model,
        "denoise_step",
        lambda batch, hidden=None: (seen.append(len(batch)), forward(batch, hidden))[1],
    )
    execute(runner, step(new=[chunk("a", "a", 0), chunk("b", "b", 0)]))
    assert seen == sizes


@pytest.mark.parametrize(("fail_at", "names"), [(2, ["a", "bad", "c"]), (1, ["a", "bad"])])
def test_an_exception_in_a_shared_forward_fails_only_its_request(
    make_runner: Any,
    null_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail_at: int,
    names: list[str],
) -> None:
    """With `batch_invariant` set to false, an exception that one request causes in a shared forward
    pass fails only that request.

    The other requests in that forward pass finish with the same results as if they had run by
    themselves.
    """
    runner = make_runner(null_world, {"batch_invariant": False})
    sizes: list[int] = []
    forward = runner.model.denoise_step
    monkeypatch.setattr(
        runner.model,
        "denoise_step",
        lambda batch, hidden=None: (sizes.append(len(batch)), forward(batch, hidden))[1],
    )
    bad = {"fail_in": "denoise", "fail_at": fail_at}
    requests = [
        chunk(name, name, 0, seed=seed, options=bad if name == "bad" else {})
        for seed, name in enumerate(names)
    ]
    results: dict[str, Any] = {}
    outcome = execute(runner, step(new=requests))
    while len(results) < len(names):
        results.update({name: result for name, result in outcome.items() if result is not None})
        outcome = execute(runner, step(running=[name for name in names if name not in results]))
    assert sizes[: fail_at + 1] == [len(names)] * (fail_at + 1), (
        "the forward that fails is a shared one"
    )
    assert isinstance(results["bad"], RequestFailed)
    solo = make_runner(null_world)
    for seed, name in enumerate(names):
        if name != "bad":
            alone = run_to_end(solo, chunk(name, name, 0, seed=seed))[name]
            assert torch.equal(latents(results[name]), latents(alone))


def test_an_error_of_the_model_reaches_the_client(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the model raises `RequestFailed`, the client receives the exception's code and message."""

    def denoise_step(batch: Any, hidden: Any = None) -> Any:
        raise RequestFailed("unsupported", "not with this camera")

    monkeypatch.setattr(runner.model, "denoise_step", denoise_step)
    failed = run_to_end(runner, chunk("r", "s", 0))["r"]
    assert isinstance(failed, RequestFailed)
    assert str(failed) == "unsupported: not with this camera"


def test_a_retried_first_chunk_keeps_its_session(runner: Any) -> None:
    """A client may retry a first chunk before the scheduler has released the failed request.
    Releasing that request does not close the retry's session.
    """
    failed = execute(runner, step(new=[chunk("r", "s", 0, options={"fail_in": "prepare"})]))["r"]
    assert isinstance(failed, RequestFailed) and "s" not in runner.sessions
    execute(runner, step(new=[chunk("again", "s", 0)]))
    execute(runner, step(finished=["r"], running=["again"]))
    assert "s" in runner.sessions
    for _ in range(STEPS - 2):
        outcome = execute(runner, step(running=["again"]))
    assert outcome["again"][0]["chunk_index"] == 0


def test_a_result_that_cannot_be_packed_fails_its_chunk(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a result cannot be packed, its chunk fails before the commit, so the client can request
    the same chunk again.
    """
    run_to_end(runner, chunk("first", "s", 0))
    before = state_of(runner, "s")
    with monkeypatch.context() as patched:
        patched.setattr(runner.model, "post_decode", lambda request: ({"note": object()}, {}))
        failed = run_to_end(runner, chunk("r", "s", 1))["r"]
    assert isinstance(failed, RequestFailed) and failed.code == "engine_error"
    assert state_of(runner, "s") == before
    assert run_to_end(runner, chunk("again", "s", 1))["again"][0]["chunk_index"] == 1


@pytest.mark.parametrize("ending", ["success", "failure", "abort"])
def test_a_one_shot_session_ends_with_its_request(runner: Any, ending: str) -> None:
    """A one-shot session is closed after a success, a failure or an abort."""
    options = {"fail_in": "decode"} if ending == "failure" else {}
    execute(runner, step(new=[chunk("r", "s", 0, one_shot=True, options=options)]))
    assert runner.request_progress() == {"s": [1, STEPS]}
    if ending != "abort":
        for _ in range(STEPS - 1):
            execute(runner, step(running=["r"]))
    execute(runner, step(finished=["r"]))
    assert "s" not in runner.sessions
    assert runner.request_progress() == {}


def test_a_one_shot_request_refuses_a_live_session(runner: Any) -> None:
    """A one-shot request for an existing session is refused, because the session would be closed
    when the request ends.
    """
    run_to_end(runner, chunk("a", "s", 0))
    before = state_of(runner, "s")
    refused = run_to_end(runner, new_request("b", session_id="s", prompt="x", one_shot=True))["b"]
    assert isinstance(refused, RequestFailed) and refused.code == "invalid_request"
    assert "one_shot needs a new session_id" in refused.message
    assert state_of(runner, "s") == before


def test_a_chunk_that_failed_on_another_rank_has_no_result(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that failed on another rank has no result: this rank neither commits nor delivers the
    result that it has packed.
    """
    run_to_end(runner, chunk("first", "s", 0))
    before = state_of(runner, "s")
    monkeypatch.setattr(runner.agreement, "several", True)
    monkeypatch.setattr(runner.agreement, "all_fine", lambda fine: False)
    failed = run_to_end(runner, chunk("r", "s", 1))["r"]
    assert isinstance(failed, RequestFailed) and "another tensor-parallel rank" in failed.message
    assert state_of(runner, "s") == before


def test_a_decode_error_of_the_model_reaches_the_client(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post_decode(request: Any) -> Any:
        raise RequestFailed("invalid_request", "this cannot be drawn")

    monkeypatch.setattr(runner.model, "post_decode", post_decode)
    failed = run_to_end(runner, chunk("r", "s", 0))["r"]
    assert isinstance(failed, RequestFailed) and (failed.code, failed.message) == (
        "invalid_request",
        "this cannot be drawn",
    )
