# SPDX-License-Identifier: Apache-2.0
"""The runner with several chunks of one session in flight. The scheduler outputs are built by
hand.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step

from vllm_omni.outputs import RequestFailed

STEPS = 2
MODEL = {
    "cache": "noise_matched",
    "window_frames": 6,
    "sink_frames": 3,
    "video_input": False,
    "denoising_steps": [1000, 500],
    "video_denoising_steps": [700, 500],
}


@pytest.fixture
def runner(make_runner: Any, causal_wan: Path) -> Any:
    return make_runner(causal_wan, {"model": MODEL, "chunks_in_flight": 3})


def chunk(index: int | None, name: str | None = None, session: str = "s", **fields: Any) -> Any:
    prompt = "a field" if index == 0 else None
    return new_request(
        name or f"{session}{index}",
        session_id=session,
        chunk_index=index,
        prompt=prompt,
        output="latents",
        **fields,
    )


def started(runner: Any) -> None:
    """Commit chunk 0, then start chunks 1, 2 and 3, each one step after its predecessor."""
    run_to_end(runner, chunk(0))
    execute(runner, step(new=[chunk(1)]))
    assert execute(runner, step(new=[chunk(2)])) == {"s2": None}
    assert execute(runner, step(new=[chunk(3)])) == {"s3": None}


def rest(runner: Any, first: int, count: int = 3) -> list[torch.Tensor]:
    """Request chunks `first` to `count` again, one at a time, and return their latents."""
    results = [
        run_to_end(runner, chunk(index, f"again{index}"))[f"again{index}"]
        for index in range(first, count + 1)
    ]
    return [result[1]["latents"] for result in results]


@pytest.fixture
def expected(make_runner: Any, causal_wan: Path) -> list[torch.Tensor]:
    one_by_one = make_runner(causal_wan, {"model": MODEL})
    return [run_to_end(one_by_one, chunk(index))[f"s{index}"][1]["latents"] for index in range(4)]


def test_chunks_in_flight_end_in_order(runner: Any) -> None:
    """Chunks in flight finish in order. Each chunk advances by one denoise step per engine step,
    and the output names the committed chunk.
    """
    started(runner)
    for names in (["s1", "s2", "s3"], ["s2", "s3"], ["s3"]):
        assert runner.request_progress()["s"] == [1, STEPS]
        with torch.inference_mode():
            output = runner.execute_model(step(running=names))
        assert output.committed == (names[0],) and output.lag_steps == 1
        assert [envelope is not None for envelope in output.pooler_output] == [True] + [False] * (
            len(names) - 1
        )
    assert runner.sessions.get("s").chunk_index == 4
    execute(runner, step(finished=["s1", "s2", "s3"]))
    assert not runner.sessions.is_pinned("s")
    again = run_to_end(runner, chunk(4))["s4"]
    assert again[0]["chunk_index"] == 4 and bool(torch.isfinite(again[1]["latents"]).all())


def test_a_batch_may_contain_waiting_chunks(runner: Any, expected: list[torch.Tensor]) -> None:
    """Chunks that may not run yet wait in the batch. A first chunk's successors wait until the
    session exists.
    """
    results: dict[str, Any] = execute(runner, step(new=[chunk(0), chunk(1), chunk(2)]))
    assert results == {"s0": None, "s1": None, "s2": None}
    assert runner.requests["s1"].chunk is None, "there is no session to follow yet"
    left = ["s0", "s1", "s2"]
    for _ in range(20):
        outcome = execute(runner, step(running=list(reversed(left))))
        results |= {name: result for name, result in outcome.items() if result is not None}
        left = [name for name in left if results[name] is None]
        if not left:
            break
    found = [results[f"s{index}"][1]["latents"] for index in range(3)]
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=False)] == [True] * 3


def test_an_aborted_chunk_fails_its_successors(runner: Any, expected: list[torch.Tensor]) -> None:
    """If a chunk is aborted, its successors fail. Earlier chunks and other sessions are unaffected.

    The session continues after its last committed chunk.
    """
    run_to_end(runner, chunk(0, session="t"))
    started(runner)
    execute(runner, step(new=[chunk(1, session="t")]))
    outcome = execute(runner, step(finished=["s2"], running=["s1", "s3", "t1"]))
    assert isinstance(outcome["s3"], RequestFailed) and outcome["s3"].code == "predecessor_failed"
    assert torch.equal(outcome["s1"][1]["latents"], expected[1])
    assert torch.equal(outcome["t1"][1]["latents"], expected[1])
    execute(runner, step(finished=["s1", "s3", "t1"]))
    assert runner.sessions.get("s").chunk_index == 2
    assert [torch.equal(a, b) for a, b in zip(rest(runner, 2), expected[2:], strict=True)] == [
        True,
        True,
    ]


def test_a_chunk_with_nan_fails_its_successors(runner: Any, expected: list[torch.Tensor]) -> None:
    """NaNs are detected at the end of a chunk. The chunk's successors fail, and the K/V that they
    have written is discarded.
    """
    started(runner)
    working = runner.requests["s1"].chunk.state
    working.latents = working.latents * float("nan")
    outcome = execute(runner, step(running=["s1", "s2", "s3"]))
    assert [outcome[name].code for name in ("s1", "s2", "s3")] == [
        "non_finite",
        *["predecessor_failed"] * 2,
    ]
    execute(runner, step(finished=["s1", "s2", "s3"]))
    assert not runner.sessions.is_pinned("s") and runner.sessions.get("s").chunk_index == 1
    assert [torch.equal(a, b) for a, b in zip(rest(runner, 1), expected[1:], strict=True)] == [
        True
    ] * 3


def test_successors_started_by_an_earlier_stage_run_and_are_discarded(
    runner: Any, expected: list[torch.Tensor]
) -> None:
    """Successors that an earlier stage has already started still run on this stage, but their
    results are discarded.

    The earlier stage sends their hidden states, labelled with the chunk index, before it receives
    the failure. A chunk that no stage has started is refused.
    """
    started(runner)
    runner.parts.in_flight.fail(runner.requests["s2"].chunk)
    states = [
        runner.requests.add_request(chunk(index, name))
        for index, name in ((4, "late"), (5, "later"), (None, "wrong"))
    ]
    for state, index in zip(states, (4, 5, 7), strict=True):
        runner.admission.admit(state, {}, index)
    assert [state.failure.code for state in states] == [
        "predecessor_failed",
        "predecessor_failed",
        "out_of_order",
    ]
    assert [state.chunk and state.chunk.state.index for state in states] == [4, 5, None]
    for name in ("s1", "s2", "s3", "late", "later"):
        runner.admission.release(runner.requests.pop(name))
    assert not runner.parts.in_flight._failed and not runner.sessions.is_pinned("s")
    assert [torch.equal(a, b) for a, b in zip(rest(runner, 1), expected[1:], strict=True)] == [
        True
    ] * 3


def test_a_chunk_that_is_not_next_is_refused(runner: Any) -> None:
    """A chunk other than the next one is refused, and other chunks are unaffected. The next chunk
    is the one after all chunks in flight.
    """
    started(runner)
    outcome = execute(runner, step(new=[chunk(3, "twice")], running=["s1", "s2", "s3"]))
    assert outcome["twice"] is None, "three are in flight: it waits"
    outcome = execute(runner, step(running=["s2", "s3", "twice"]))
    assert outcome["twice"].code == "out_of_order" and "expects 4" in outcome["twice"].message
    assert execute(runner, step(running=["s3"]))["s3"][0]["chunk_index"] == 3


def test_models_without_chunks_in_flight_are_refused(
    make_runner: Any, causal_wan: Path, null_world: Path
) -> None:
    """If a model does not support several chunks in flight, the option is refused and the error
    states the reason.
    """
    with pytest.raises(ValueError, match="cache 'strict' shows a chunk the clean chunk before it"):
        make_runner(causal_wan, {"chunks_in_flight": 2})
    with pytest.raises(ValueError, match="its next chunk needs the previous one complete"):
        make_runner(null_world, {"chunks_in_flight": 2})
