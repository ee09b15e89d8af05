# SPDX-License-Identifier: Apache-2.0
"""A chunk is decoded once its latents are final, before its clean-context pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step

from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.decode import ResultStream
from vllm_omni.worker.diffusion.sessions.in_flight import ChunksInFlight

STEPS = 5
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["one_stream", "overlap_decode"])


def chunk(request_id: str, index: int, **options: Any) -> Any:
    return new_request(
        request_id,
        session_id="s",
        chunk_index=index,
        prompt="a field" if index == 0 else None,
        seed=3 if index == 0 else None,
        options={"clean_pass": True, "steps": STEPS, **options},
    )


def count(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the names of the model methods called from now on, in call order."""
    calls: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        call = getattr(runner.model, name)

        def wrapped(*args: Any) -> Any:
            calls.append(name)
            return call(*args)

        return wrapped

    for name in ("denoise_step", "post_decode", "commit"):
        monkeypatch.setattr(runner.model, name, noted(name))
    return calls


def state_of(runner: Any) -> tuple[Any, dict[str, bytes]]:
    session = runner.sessions.get("s")
    return session.scalars(), {
        name: t.cpu().numpy().tobytes() for name, t in session.tensors().items()
    }


@OVERLAP
def test_frames_are_decoded_before_the_clean_pass_and_committed_after_it(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """A chunk is decoded before its clean-context pass and committed after it."""
    runner = make_runner(null_world, {"overlap_decode": overlap})
    calls = count(runner, monkeypatch)
    run_to_end(runner, chunk("r", 0))
    assert calls == ["denoise_step"] * (STEPS - 1) + ["post_decode", "denoise_step", "commit"]


def test_the_decode_is_launched_in_the_last_denoise_step(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode is launched in the same engine step as the last denoise step.

    This matters because the host takes longer to launch a decode and a clean-context pass than the
    device takes to run the decode.
    """
    runner = make_runner(null_world)
    calls = count(runner, monkeypatch)
    execute(runner, step(new=[chunk("r", 0)]))
    for _ in range(STEPS - 2):
        execute(runner, step(running=["r"]))
    assert calls == ["denoise_step"] * (STEPS - 1) + ["post_decode"]


@pytest.mark.parametrize("family", ["null_world", "causal_wan"])
def test_the_order_changes_no_bit(
    family: str, make_runner: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames and session states of three chunks are bit-identical whether the decode runs
    before or after the clean-context pass.
    """
    model = request.getfixturevalue(family)
    found = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(ChunksInFlight, "is_next", lambda self, request: False)
        runner = make_runner(model, {"height": 32, "width": 48})
        calls = count(runner, monkeypatch)
        frames = []
        for index in range(3):
            fields = {
                "chunk_index": index,
                **({"prompt": "a field", "seed": 3} if index == 0 else {}),
            }
            if family == "null_world":
                fields["options"] = {"clean_pass": True}
            name = f"{family}-{index}"
            result = run_to_end(runner, new_request(name, None, session_id="s", **fields))[name]
            frames.append(result[1]["frames"].clone())
        assert calls[calls.index("post_decode") + 1] == ("denoise_step" if early else "commit")
        found.append((frames, state_of(runner)))
    (early_frames, early_state), (late_frames, late_state) = found
    assert all(torch.equal(a, b) for a, b in zip(early_frames, late_frames, strict=True))
    assert early_state == late_state


@OVERLAP
def test_a_failed_clean_pass_fails_the_chunk(
    make_runner: Any, null_world: Path, overlap: bool
) -> None:
    """If the clean-context pass fails, the frames are not delivered and the session keeps its
    previous state.

    The client can request the same chunk again.
    """
    runner = make_runner(null_world, {"overlap_decode": overlap})
    run_to_end(runner, chunk("first", 0))
    before = state_of(runner)
    failed = run_to_end(runner, chunk("bad", 1, fail_in="denoise", fail_at=STEPS - 1))["bad"]
    assert isinstance(failed, RequestFailed) and failed.code == "engine_error"
    assert state_of(runner) == before and not runner.sessions.is_pinned("s")
    again = run_to_end(runner, chunk("again", 1))["again"]
    other = make_runner(null_world, {"overlap_decode": overlap})
    run_to_end(other, chunk("first", 0))
    assert torch.equal(
        again[1]["frames"], run_to_end(other, chunk("again", 1))["again"][1]["frames"]
    )


@OVERLAP
def test_a_failed_decode_fails_the_chunk_after_its_clean_pass(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """If the decode fails, the chunk is not committed. The clean-context pass still runs, because
    other ranks take part in it.
    """
    runner = make_runner(null_world, {"overlap_decode": overlap})
    run_to_end(runner, chunk("first", 0))
    before = state_of(runner)
    calls = count(runner, monkeypatch)
    failed = run_to_end(runner, chunk("bad", 1, fail_in="decode"))["bad"]
    assert isinstance(failed, RequestFailed) and failed.code == "engine_error"
    assert calls == ["denoise_step"] * (STEPS - 1) + ["post_decode", "denoise_step"]
    assert state_of(runner) == before


@OVERLAP
def test_decoded_latents_that_are_not_finite_are_refused(
    make_runner: Any, null_world: Path, overlap: bool
) -> None:
    """A chunk whose latents are not finite fails even though it has already been decoded."""
    runner = make_runner(null_world, {"overlap_decode": overlap})
    run_to_end(runner, chunk("first", 0))
    before = state_of(runner)
    failed = run_to_end(runner, new_nan("bad"))["bad"]
    assert isinstance(failed, RequestFailed) and failed.code == "non_finite"
    assert "the chunk's latents" in failed.message
    assert state_of(runner) == before


def new_nan(request_id: str) -> Any:
    options = {"clean_pass": True, "steps": STEPS, "nan_at": STEPS - 2}
    return new_request(request_id, session_id="s", chunk_index=1, output="latents", options=options)


def test_an_abort_before_the_clean_pass_keeps_the_session(
    make_runner: Any, null_world: Path
) -> None:
    runner = make_runner(null_world)
    run_to_end(runner, chunk("first", 0))
    before = state_of(runner)
    execute(runner, step(new=[chunk("r", 1)]))
    for _ in range(STEPS - 2):
        execute(runner, step(running=["r"]))
    execute(runner, step(finished=["r"]))
    assert state_of(runner) == before and not runner.sessions.is_pinned("s")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_result_does_not_wait_for_later_work() -> None:
    """The host receives a result while the clean-context pass is still running on the same CUDA
    stream.

    The reported timings therefore exclude the clean-context pass.
    """
    from vllm_omni.model_executor.device_async import StageTimer
    from vllm_omni.model_executor.interfaces import DiffusionRequest
    from vllm_omni.outputs import unpack

    class Decoder:
        def post_decode(self, request: Any) -> Any:
            return {}, {"x": request.state * 2}

    class Session:
        session_id, chunk_index = "s", 0

    device = torch.device("cuda")
    state = torch.full((1 << 20,), 3.0, device=device)
    timer = StageTimer(device)
    request = DiffusionRequest("r", None, {}, Session(), state=state, timer=timer)  # type: ignore[arg-type]
    stream = ResultStream(device, overlap=False)
    (result,) = stream.launch([request], [0.0], lambda: [Decoder().post_decode(request)])
    with timer.stage("steps"):
        torch.cuda._sleep(2_000_000_000)
    meta, tensors = unpack(result.envelope())
    assert not torch.cuda.current_stream().query()
    assert set(meta["timings_ms"]) == {"decode", "total"} and bool((tensors["x"] == 6).all())
    assert set(timer.milliseconds()) == {"decode", "steps"}


@pytest.mark.parametrize("clean_pass", [True, False], ids=["before the clean pass", "at the end"])
def test_a_shared_decode_requires_all_ranks(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch, clean_pass: bool
) -> None:
    """If another rank has refused a chunk, the shared decode does not start and the chunk fails."""
    runner = make_runner(null_world)
    runner.chunk_end.shares_decode = True
    calls = count(runner, monkeypatch)
    monkeypatch.setattr(runner.agreement, "several", True)
    monkeypatch.setattr(runner.agreement, "all_fine", lambda fine: False)
    failed = run_to_end(runner, chunk("r", 0, clean_pass=clean_pass))["r"]
    assert isinstance(failed, RequestFailed) and "another tensor-parallel rank" in failed.message
    assert "post_decode" not in calls and "commit" not in calls
    monkeypatch.setattr(runner.agreement, "all_fine", lambda fine: fine)
    run_to_end(runner, chunk("again", 0, clean_pass=clean_pass))
    assert runner.sessions.get("s").chunk_index == 1


def test_an_error_in_a_shared_decode_stops_the_engine(make_runner: Any, null_world: Path) -> None:
    """The runner re-raises an error that occurs in a shared decode, because other ranks are waiting
    in that decode's collectives.
    """
    runner = make_runner(null_world)
    runner.chunk_end.shares_decode = True
    with pytest.raises(RuntimeError, match="injected failure"):
        run_to_end(runner, chunk("r", 0, fail_in="decode"))
