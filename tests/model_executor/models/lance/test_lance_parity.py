# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify lance` passes for the recorded directory and detects damage to it."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.golden import golden_folder
from helpers.recordings import change_tensor
from safetensors.torch import load_file, save_file

from vllm_omni.entrypoints.cli.main import main
from vllm_omni.testing.parity.lance import verify

GOLDEN = golden_folder("lance")
_BESIDE = (
    "meta_fp32.json",
    "meta_bf16.json",
    "state_dict.safetensors",
    "state_dict_vae.safetensors",
)


def test_every_recorded_scenario_passes() -> None:
    """The recordings contain all tasks in fp32 (within 2e-5 per stage and 1e-4 at the end), runs in
    bf16, the autoencoder, and the released tensor names.
    """
    report = verify(GOLDEN)
    assert report.ok, report.to_text()
    assert {row.scenario for row in report.rows} == {
        "golden_fp32",
        "golden_bf16",
        "golden_vae",
        "report_vae_vit",
    }
    stages = {row.stage.split(":")[0] for row in report.rows if row.scenario == "golden_fp32"}
    tasks = {"t2i", "t2v", "i2v", "image_edit", "video_edit", "x2t_image", "x2t_video"}
    assert tasks <= stages and {"text", "velocity", "tables"} <= stages


@pytest.mark.parametrize(
    ("file", "tensor", "amount"),
    [
        pytest.param("golden_fp32.safetensors", "a.k1", 1e-4, marks=pytest.mark.nightly),
        ("golden_fp32.safetensors", "b.velocity", 1e-4),
        pytest.param(
            "golden_fp32.safetensors", "image_edit.mrope_shifted", 1, marks=pytest.mark.nightly
        ),
        pytest.param("golden_fp32.safetensors", "i2v.nokv.latent", 1e-3, marks=pytest.mark.nightly),
        ("golden_fp32.safetensors", "x2t_video.kv.tokens", 1),
        ("golden_vae.safetensors", "vae.t5.dec", 1e-3),
    ],
)
def test_a_changed_recording_fails(file: str, tensor: str, amount: float, tmp_path: Path) -> None:
    for name in (file, *_BESIDE):
        shutil.copyfile(GOLDEN / name, tmp_path / name)
    change_tensor(tmp_path / file, tensor, amount)
    assert not verify(tmp_path).ok


def test_the_number_of_steps_must_be_recorded(tmp_path: Path) -> None:
    """Verification fails if the recording does not state its number of steps, because such a
    recording cannot be replayed.
    """
    for name in ("golden_fp32.safetensors", *_BESIDE):
        shutil.copyfile(GOLDEN / name, tmp_path / name)
    path = tmp_path / "golden_fp32.safetensors"
    retained = {
        name: tensor
        for name, tensor in load_file(path).items()
        if name.startswith("t2i.") and ".x_t" not in name
    }
    save_file(retained, path)
    assert "t2i has no x_t" in verify(tmp_path).to_text()


def test_the_command_reports_and_fails_for_an_empty_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["verify", "lance", "--golden", str(tmp_path)])
    assert exit_status.value.code == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["llm", "vit", "latent"])
def test_an_unknown_recorded_setting_is_refused(part: str, tmp_path: Path) -> None:
    """Verification refuses an unknown recorded setting, because ignoring it would mean comparing a
    different network.
    """
    for name in ("golden_fp32.safetensors", *_BESIDE):
        shutil.copyfile(GOLDEN / name, tmp_path / name)
    meta = json.loads((tmp_path / "meta_fp32.json").read_text())
    meta["config"][part]["swirl"] = 3
    (tmp_path / "meta_fp32.json").write_text(json.dumps(meta))
    assert f"config.{part} has unknown settings: swirl" in verify(tmp_path).to_text()
