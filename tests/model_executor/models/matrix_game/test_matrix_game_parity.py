# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify matrix_game` passes for the recorded directory and detects damage to each kind
of file.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.recordings import change_settings, change_tensor, rewrite
from matrix_game_driver import GOLDEN
from safetensors.torch import load_file

from vllm_omni.model_executor.models.matrix_game.pipeline import MatrixGame
from vllm_omni.model_executor.models.wan.vae.vae import to_uint8
from vllm_omni.testing.parity.matrix_game import verify

WEIGHTS = (
    "mg_meta.json",
    "vae_tiny_weights_orig_names.safetensors",
    "clip_tiny_weights_orig_names.safetensors",
)


def copy(directory: Path, *names: str) -> None:
    for path in GOLDEN.iterdir():
        if path.name in (*names, *WEIGHTS) or path.name.startswith("tiny_"):
            shutil.copyfile(path, directory / path.name)


def test_every_recorded_scenario_passes() -> None:
    report = verify(GOLDEN)
    assert report.ok, report.to_text()
    scenarios = {
        path.stem for path in GOLDEN.iterdir() if not path.name.startswith(("tiny_", "README"))
    }
    assert {row.scenario for row in report.rows} == scenarios - {
        name.split(".")[0] for name in WEIGHTS
    }


def test_pixels_are_truncated_as_recorded() -> None:
    """Frames exactly equal the original implementation's pixels, which are truncated to integers.
    Other model families round their pixels.
    """
    recorded = load_file(GOLDEN / "condition.safetensors")
    pixels = recorded["decoded"].transpose(1, 2)
    assert torch.equal(to_uint8(pixels, MatrixGame.rounding), recorded["decoded_u8"])


@pytest.mark.parametrize(
    "tensor",
    [
        "call04.flow",
        "call15.mouse0.k",
        "call15.keyboard0.v",
        "call15.cache1.k",
        "call04.block0.action_out",
        "call00.mouse_window",
        "cross1.v",
        "keyboard_cond",
        "renoise05",
    ],
)
def test_a_changed_recording_fails(tensor: str, tmp_path: Path) -> None:
    copy(tmp_path, "mg_gta_win4.safetensors")
    change_tensor(tmp_path / "mg_gta_win4.safetensors", tensor, 0.1)
    assert not verify(tmp_path).ok


@pytest.mark.parametrize(
    ("tensor", "amount"), [("visual_context", 1e-3), ("cond_latent", 1e-3), ("crop_u8", 1)]
)
def test_a_changed_recording_of_the_image_fails(tensor: str, amount: float, tmp_path: Path) -> None:
    copy(tmp_path, "condition.safetensors")
    change_tensor(tmp_path / "condition.safetensors", tensor, amount)
    assert not verify(tmp_path).ok


def test_a_changed_table_fails(tmp_path: Path) -> None:
    for name in ("schedule.json", "clip_key_map.json", "key_map_orig_to_diffusers.json"):
        table = json.loads((GOLDEN / name).read_text())
        if name == "schedule.json":
            table["schedules"][0]["sigmas_x0"][1] += 1e-5
        else:
            first, second, *_ = table
            table[first], table[second] = table[second], table[first]
        (tmp_path / name).write_text(json.dumps(table))
    report = verify(tmp_path)
    assert {row.scenario for row in report.rows if not row.ok} == {
        "schedule",
        "clip_key_map",
        "key_map_orig_to_diffusers",
    }


def test_a_missing_stage_of_a_call_fails(tmp_path: Path) -> None:
    copy(tmp_path, "mg_gta_win4.safetensors")
    path = tmp_path / "mg_gta_win4.safetensors"
    rewrite(path, lambda tensors: {n: t for n, t in tensors.items() if n != "call03.flow"})
    assert not verify(tmp_path).ok


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("cfg", "VAE config has unknown keys swirl"),
        ("clip_cfg", "clip_cfg has unknown settings: swirl"),
    ],
)
def test_an_unknown_recorded_setting_is_refused(key: str, complaint: str, tmp_path: Path) -> None:
    """An unknown recorded setting of the VAE or of CLIP is refused, because ignoring it would mean
    comparing a different network.
    """
    copy(tmp_path, "condition.safetensors")
    change_settings(tmp_path / "condition.safetensors", key, swirl=3)
    assert complaint in verify(tmp_path).to_text()
