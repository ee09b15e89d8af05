# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify abot_world` passes for the recorded directories and detects damage to each kind
of file.
"""

import json
import shutil
from pathlib import Path

import pytest
from helpers.golden import golden_folder, shared_golden
from helpers.recordings import change_tensor, rewrite

from vllm_omni.testing.parity.abot_world import verify

GOLDEN, VAE = golden_folder("abot_world_0"), golden_folder("wan22_vae")
ROLLOUT = "abot_ref3_win9_rebase13.safetensors"


def test_the_recorded_subset_passes(tmp_path: Path) -> None:
    copy(tmp_path, *(path.name for path in GOLDEN.iterdir()))
    report = verify(tmp_path)
    assert report.ok, report.to_text()
    assert {"schedule", "abot_condition", "abot_ref3_win9_rebase13"} == {
        row.scenario for row in report.rows
    }


def test_every_recorded_scenario_passes() -> None:
    report = verify(shared_golden("abot_world_0"))
    assert report.ok, report.to_text()
    assert len({row.scenario for row in report.rows}) == 9


def copy(directory: Path, *names: str) -> None:
    for path in (*GOLDEN.iterdir(), *VAE.iterdir()):
        if (
            path.name in (*names, "abot_meta.json")
            or "weights_orig" in path.name
            or path.name == "abot_tiny_weights.safetensors"
        ):
            shutil.copyfile(path, directory / path.name)


@pytest.mark.parametrize(
    "tensor",
    [
        "call04.flow",
        "call29.k_raw0",
        "call29.k_roped2",
        "call29.v1",
        "call04.block0.out",
        "call05.patch_ref",
        "call00.act",
        "cross1.v",
        "renoise05",
        "ref_latents",
        "first_frame",
    ],
)
def test_a_changed_recording_fails(tensor: str, tmp_path: Path) -> None:
    copy(tmp_path, ROLLOUT)
    change_tensor(tmp_path / ROLLOUT, tensor, 0.1)
    assert not verify(tmp_path).ok


@pytest.mark.parametrize(
    ("tensor", "amount"),
    [("ref_latents", 1e-3), ("image0_latent", 1e-3), ("ref0_resized_u8", 1)],
)
def test_a_changed_recording_of_the_images_fails(
    tensor: str, amount: float, tmp_path: Path
) -> None:
    copy(tmp_path, "abot_condition.safetensors")
    change_tensor(tmp_path / "abot_condition.safetensors", tensor, amount)
    assert not verify(tmp_path).ok


def test_a_changed_table_fails(tmp_path: Path) -> None:
    table = json.loads((GOLDEN / "schedule.json").read_text())
    table["sigmas"][1] += 1e-5
    (tmp_path / "schedule.json").write_text(json.dumps(table))
    assert not verify(tmp_path).ok


def test_another_recorded_rebase_limit_fails(tmp_path: Path) -> None:
    """Verification fails if the recording used a different re-base limit, because the recorded
    counters include the frame with position 0.
    """
    copy(tmp_path, ROLLOUT)
    meta = json.loads((tmp_path / "abot_meta.json").read_text())
    meta["cases"][ROLLOUT.removesuffix(".safetensors")]["rebase_max_pos"] = 256
    (tmp_path / "abot_meta.json").write_text(json.dumps(meta))
    assert not verify(tmp_path).ok


def test_a_missing_stage_of_a_call_fails(tmp_path: Path) -> None:
    copy(tmp_path, ROLLOUT)
    rewrite(
        tmp_path / ROLLOUT, lambda tensors: {n: t for n, t in tensors.items() if n != "call03.flow"}
    )
    assert not verify(tmp_path).ok
