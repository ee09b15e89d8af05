# SPDX-License-Identifier: Apache-2.0
"""How the runner handles the scheduler's notes and reports progress."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step

from vllm_omni.core.step_protocol import ChunkProgress, SchedulerNote
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.pacing import StepPacer


def noted(request_id: str, note: SchedulerNote) -> Any:
    data = new_request(
        request_id, session_id=request_id, chunk_index=0, prompt="a field", output="latents"
    )
    assert data.pooling_params is not None
    data.pooling_params = note.attach_to_params(data.pooling_params)
    return data


@pytest.fixture(scope="module")
def model(null_world: Path) -> Path:
    return null_world


def test_a_refused_request_fails_without_a_session(make_runner: Any, model: Path) -> None:
    runner = make_runner(model)
    result = execute(runner, step(new=[noted("r", SchedulerNote(refused="no room for it"))]))["r"]
    assert isinstance(result, RequestFailed) and (result.code, result.message) == (
        "capacity",
        "no room for it",
    )
    assert len(runner.sessions) == 0


def test_a_degraded_chunk_takes_fewer_steps_and_reports_it(make_runner: Any, model: Path) -> None:
    runner = make_runner(model, {"scheduling": "deadline", "degradations": ["fewer_steps"]})
    meta, _ = run_to_end(runner, noted("r", SchedulerNote(degradations=["fewer_steps"])))["r"]
    assert meta["degradations"] == ["fewer_steps"] and len(meta["timings_ms"]["steps"]) == 3
    meta, _ = run_to_end(runner, noted("q", SchedulerNote()))["q"]
    assert "degradations" not in meta and len(meta["timings_ms"]["steps"]) == 5


def test_unsupported_degradations_are_refused_at_startup(make_runner: Any, model: Path) -> None:
    with pytest.raises(ValueError, match="'tiny_vae': Null world does not support it"):
        make_runner(model, {"scheduling": "deadline", "degradations": ["tiny_vae"]})


def test_progress_of_running_chunks_is_reported(make_runner: Any, model: Path) -> None:
    """The reported progress consists of the number of completed steps, the total number of steps
    and the number of latent elements.

    Progress is not reported for finished chunks.
    """
    runner = make_runner(model)
    output = runner.execute_model(step(new=[noted("r", SchedulerNote())]))
    assert output.progress == {"r": ChunkProgress(1, 5, 4 * 4 * 6)}
    for _ in range(3):
        runner.execute_model(step(running=["r"]))
    assert runner.execute_model(step(running=["r"])).progress == {}


class Busy(StepPacer):
    """A mock device whose previous step took a quarter of a second and whose current step is still
    running.
    """

    @property
    def before_s(self) -> float:
        return 0.25

    @property
    def unfinished(self) -> bool:
        return True


def test_the_device_time_is_reported_to_the_scheduler(make_runner: Any, model: Path) -> None:
    runner = make_runner(model)
    output = runner.execute_model(step(new=[noted("r", SchedulerNote())]))
    assert (output.before_s, output.unfinished) == (None, False), (
        "on a CPU a step has ended when its launch returns"
    )
    runner.role.pacer = Busy(runner.device)
    output = runner.execute_model(step(running=["r"]))
    assert (output.before_s, output.unfinished) == (0.25, True)


def test_an_admitted_chunk_without_latents_has_the_smallest_size(
    make_runner: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an admitted chunk has no latents yet, its progress is reported with the smallest possible
    number of latent elements.
    """
    runner = make_runner(model)

    def only_admit(states: Any, received: Any) -> dict[str, Any]:
        for state in states:
            runner.admission.admit(state, {})
        return {}

    monkeypatch.setattr(runner.role, "step", only_admit)
    with torch.inference_mode():
        assert runner.execute_model(step(new=[noted("r", SchedulerNote())])).progress == {
            "r": ChunkProgress(0, 5, 1)
        }
