# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan` of Waypoint: against its run, its sizes, and the splits it can be served with."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plan_errors
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.planning.cards import H200
from vllm_omni.planning.cost import predict, splits, window_bytes
from vllm_omni.planning.models import model_of
from vllm_omni.planning.report import plan_text
from vllm_omni.planning.stream_model import Split

RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-25_waypoint_cuda_graphs.json"


def test_the_measured_run_is_predicted_within_20_percent() -> None:
    result = json.loads(RUN.read_text())["result"]
    found = predict(model_of("waypoint", cuda_graphs=True), H200, Split())
    assert found.chunk_ms == pytest.approx(result["chunk_interval_ms"], rel=0.2)
    assert found.memory_bytes == pytest.approx(result["device_memory"][0]["torch_peak"], rel=0.2)
    assert found.session_bytes == pytest.approx(result["session_bytes"], rel=0.01)


def test_a_first_frame_waits_for_one_pass_without_a_graph() -> None:
    """Of the run's sessions behind the first one, which also waits for what a server does once."""
    run = json.loads(RUN.read_text())
    model, card = model_of("waypoint", cuda_graphs=True), plan_errors.card_of(RUN.stem, run)
    measured = statistics.median(later["time_to_first_frame_ms"] for later in run["result"]["later_first_frames"])
    assert card is not None and predict(model, card, Split()).first_frame_ms == pytest.approx(measured, rel=0.2)
    assert predict(replace(model, cuda_graphs=False), H200, Split()).first_frame_ms > 150


def test_both_kinds_of_rings_are_counted() -> None:
    """780 MiB of keys and values at 1280x720 (18 layers of 16 frames, 6 of 17), a quarter of it at 640x360."""
    large, small = (window_bytes(model_of(name), 16) for name in ("waypoint", "waypoint_360p"))
    assert large == 780 * 2**20 and small == large / 4
    assert predict(model_of("waypoint"), replace(H200, memory_bytes=16e9), Split()).fits


def test_only_splits_and_options_that_it_has_are_offered() -> None:
    model = model_of("waypoint")
    found = splits(model, 4)
    assert not any(split.vae_parallel or (split.ranks > 1 and not split.tensor) for split in found)
    assert {split.ranks for split in found} == {1, 2, 4}
    assert "latent_frames_per_chunk" not in plan_text(model, H200, 1, 1)


@pytest.mark.parametrize("change", [{"window": 3}, {"chunk": 3}, {"video_input": True}, {"clean": 0}])
def test_what_a_checkpoint_fixes_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="fixes its windows, chunks and steps"):
        model_of("waypoint", **change)


@pytest.mark.parametrize(("layout", "frames"), [("v1_5", 4), ("v1", 1)])
def test_a_checkpoint_directory_is_planned(tmp_path: Path, layout: str, frames: int) -> None:
    get_family("waypoint").make_tiny(tmp_path, 0, layout)
    model = model_of(str(tmp_path))
    assert model.frames_per_chunk == frames
    assert (model.context_rows > 0) == (layout == "v1")
    assert predict(model, H200, Split()).fps > 0
