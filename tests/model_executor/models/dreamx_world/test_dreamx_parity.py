# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify dreamx_world` passes for the recorded directories and detects damage to each
kind of file.
"""

import shutil
from pathlib import Path

import pytest
from helpers.golden import golden_folder, shared_golden
from helpers.recordings import change_tensor, rewrite

from vllm_omni.testing.parity.dreamx_world import verify

GOLDEN = golden_folder("dreamx_world_5b")
CASE = "dreamx_win6_sink1.safetensors"


def copy(directory: Path, *names: str) -> None:
    for path in GOLDEN.iterdir():
        if path.name in (*names, "dreamx_meta.json") or "weights" in path.name:
            shutil.copyfile(path, directory / path.name)


def test_the_recorded_subset_passes() -> None:
    report = verify(GOLDEN)
    assert report.ok, report.to_text()


def test_every_recorded_scenario_passes() -> None:
    """If the full recorded set is present, each of its scenarios passes."""
    folder = shared_golden("dreamx_world_5b")
    report = verify(folder)
    assert report.ok, report.to_text()
    scenarios = {path.stem for path in folder.glob("*.safetensors") if "weights" not in path.name}
    assert {row.scenario for row in report.rows} == scenarios and len(scenarios) == 8


@pytest.mark.parametrize(
    "tensor",
    [
        "call04.flow",
        "call19.k_raw1",
        "call19.v0",
        "call05.block2.cam_self_attn",
        "call00.time_e0",
        "cross1.v",
        "viewmats",
        "renoise05",
        "first_frame",
        "latents",
    ],
)
def test_a_changed_recording_fails(tensor: str, tmp_path: Path) -> None:
    copy(tmp_path, CASE)
    change_tensor(tmp_path / CASE, tensor, 0.1)
    assert not verify(tmp_path).ok


@pytest.mark.parametrize("tensor", ["share0.w2c", "share1.viewmats_chunk", "speed1.viewmats"])
def test_a_changed_recording_of_the_camera_fails(tensor: str, tmp_path: Path) -> None:
    copy(tmp_path, "dreamx_camera.safetensors")
    change_tensor(tmp_path / "dreamx_camera.safetensors", tensor, 1e-3)
    assert not verify(tmp_path).ok


def test_a_missing_pass_fails(tmp_path: Path) -> None:
    copy(tmp_path, CASE)
    rewrite(
        tmp_path / CASE, lambda tensors: {n: t for n, t in tensors.items() if n != "call03.flow"}
    )
    assert not verify(tmp_path).ok
