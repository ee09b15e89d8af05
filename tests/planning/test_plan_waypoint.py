# SPDX-License-Identifier: Apache-2.0
"""Tests of `vllm-omni plan` for Waypoint: memory sizes and supported splits."""

from pathlib import Path

import pytest

from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.planning.memory import GPU_BYTES, plan_memory, splits, window_bytes
from vllm_omni.planning.models import model_of
from vllm_omni.planning.report import ServedDefaults, plan_text
from vllm_omni.planning.stream_model import ParallelSplit


def test_both_kinds_of_ring_buffers_are_counted() -> None:
    """The K/V cache takes up 780 MiB at 1280x720 (18 layers of 16 frames, 6 layers of 17 frames)
    and a quarter of that at 640x360.
    """
    large, small = (window_bytes(model_of(name), 16) for name in ("waypoint", "waypoint_360p"))
    assert large == 780 * 2**20 and small == large / 4
    assert plan_memory(model_of("waypoint"), 16e9, ParallelSplit()).max_sessions > 0


def test_only_supported_splits_and_options_are_listed() -> None:
    model = model_of("waypoint")
    found = splits(model, 4)
    assert not any(split.vae_parallel or (split.ranks > 1 and not split.tensor) for split in found)
    assert {split.ranks for split in found} == {1, 2, 4}
    assert "latent_frames_per_chunk" not in plan_text(
        model, ServedDefaults(model, model.denoise), "H200", 1, 1
    )


@pytest.mark.parametrize(
    "change", [{"window": 3}, {"chunk": 3}, {"video_input": True}, {"noise_matched": True}]
)
def test_options_that_a_checkpoint_fixes_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="steps of a Waypoint checkpoint are fixed"):
        model_of("waypoint", **change)


@pytest.mark.parametrize(("layout", "frames"), [("v1_5", 4), ("v1", 1)])
def test_a_checkpoint_directory_is_planned(tmp_path: Path, layout: str, frames: int) -> None:
    get_family("waypoint").make_tiny(tmp_path, 0, layout)
    model = model_of(str(tmp_path))
    assert model.frames_per_chunk == frames
    assert (model.context_length > 0) == (layout == "v1")
    assert plan_memory(model, GPU_BYTES["H200"], ParallelSplit()).max_sessions > 0
