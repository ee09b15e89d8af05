# SPDX-License-Identifier: Apache-2.0
"""Results that come with a later step than the chunk's last one (`omni.overlap_decode`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scheduling import execute, new_request, run_to_end, step

from vllm_omni.worker.overlap import ResultStream

STEPS = 5


@pytest.fixture
def runner(make_runner: Any, null_world: Path) -> Any:
    return make_runner(null_world, {"overlap_decode": True})


def chunk(request_id: str, index: int, **fields: Any) -> Any:
    prompt = "a field" if index == 0 else None
    return new_request(
        request_id, session_id="s", chunk_index=index, prompt=prompt, seed=3 if index == 0 else None, **fields
    )


def denoise(runner: Any, request: Any) -> Any:
    """Take all steps of a request; returns the raw output of the last."""
    execute(runner, step(new=[request]))
    for _ in range(STEPS - 2):
        execute(runner, step(running=[request.req_id]))
    with torch.inference_mode():
        return runner.execute_model(step(running=[request.req_id]))


def test_the_chunk_is_committed_before_its_result_is_delivered(runner: Any) -> None:
    """The step that ends it says so to the scheduler; the next step it is in brings the result."""
    output = denoise(runner, chunk("r", 0))
    assert output.denoised == ("r",) and output.pooler_output == [None]
    assert runner.sessions.get("s").chunk_index == 1
    meta, _ = execute(runner, step(running=["r"]))["r"]
    assert (meta["chunk_index"], meta["num_frames"]) == (0, 9)


def test_the_next_chunk_starts_in_the_step_that_delivers_the_last(
    runner: Any, make_runner: Any, null_world: Path
) -> None:
    """And frames are those of chunks that run one after the other."""
    one_by_one = make_runner(null_world, {"overlap_decode": False})
    expected = [run_to_end(one_by_one, chunk(name, index))[name] for index, name in enumerate("ab")]
    denoise(runner, chunk("a", 0))
    both = execute(runner, step(running=["a"], new=[chunk("b", 1)]))
    assert both["b"] is None and runner.request_progress()["s"] == [1, STEPS]
    results = [both["a"]]
    execute(runner, step(finished=["a"], running=["b"]))
    for _ in range(STEPS - 2):
        execute(runner, step(running=["b"]))
    results.append(execute(runner, step(running=["b"]))["b"])
    for (meta, tensors), (expected_meta, expected_tensors) in zip(results, expected, strict=True):
        assert torch.equal(tensors["frames"], expected_tensors["frames"])
        assert {**meta, "timings_ms": 0} == {**expected_meta, "timings_ms": 0}


def test_giving_up_a_result_on_its_way_keeps_the_chunk(runner: Any) -> None:
    """The chunk is part of the session by then; the client asks for the next one."""
    denoise(runner, chunk("r", 0))
    execute(runner, step(finished=["r"]))
    assert runner.sessions.get("s").chunk_index == 1 and not runner.sessions.is_pinned("s")
    assert run_to_end(runner, chunk("next", 1))["next"][0]["chunk_index"] == 1


def test_a_decode_that_fails_leaves_the_session_as_it_was(runner: Any) -> None:
    """It fails where it is launched, before the commit, and the answer does not wait for another step."""
    output = denoise(runner, chunk("r", 0, options={"fail_in": "decode"}))
    assert output.denoised == () and output.pooler_output[0] is not None
    execute(runner, step(finished=["r"]))
    assert "s" not in runner.sessions


def test_the_stock_scheduler_gets_its_results_at_once(make_runner: Any, null_world: Path) -> None:
    """It would not schedule the request again."""
    runner = make_runner(null_world, {"overlap_decode": True}, "vllm.v1.core.sched.scheduler.Scheduler")
    assert execute(runner, step(new=[chunk("r", 0)]))["r"][0]["chunk_index"] == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_decode_runs_beside_later_work_and_reads_what_was_there() -> None:
    """Work queued after it neither delays the result's copy nor changes what it sees."""

    class Slow:
        def post_decode(self, request: Any) -> Any:
            torch.cuda._sleep(20_000_000)
            return {}, {"x": request.state * 2}

    class Session:
        session_id, chunk_index = "s", 0

    from vllm_omni.model_executor.interfaces import DiffusionRequest
    from vllm_omni.outputs import unpack

    device = torch.device("cuda")
    stream = ResultStream(device, overlap=True)
    request = DiffusionRequest("r", None, {}, Session(), state=torch.full((1 << 20,), 3.0, device=device))  # type: ignore[arg-type]
    result = stream.decode(Slow(), request, 0.0)  # type: ignore[arg-type]
    torch.cuda._sleep(2_000_000_000)
    _, tensors = unpack(result.envelope())
    assert not torch.cuda.current_stream().query()
    assert bool((tensors["x"] == 6).all())
