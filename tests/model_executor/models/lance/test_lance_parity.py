# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify lance` on the recorded directory, and that it notices damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lance_reference import record
from safetensors.torch import load_file, save_file

from vllm_omni.entrypoints.cli.main import main
from vllm_omni.testing.parity.lance import verify

GOLDEN = Path(__file__).parents[3] / "golden" / "lance"
_BESIDE = (
    "meta_fp32.json",
    "meta_bf16.json",
    "state_dict.safetensors",
    "state_dict_vae.safetensors",
)


def test_every_recorded_scenario_holds() -> None:
    """All tasks in fp32 within 2e-5 per stage and 1e-4 at the end, bf16, the autoencoder, the
    real names.
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
def test_a_changed_recording_is_noticed(
    file: str, tensor: str, amount: float, tmp_path: Path
) -> None:
    for name in (file, *_BESIDE):
        shutil.copyfile(GOLDEN / name, tmp_path / name)
    tensors = load_file(tmp_path / file)
    tensors[tensor].view(-1)[0] += amount
    save_file(tensors, tmp_path / file)
    assert not verify(tmp_path).ok


SIZES = {
    "hidden": 64,
    "ffn": 80,
    "layers": 3,
    "heads": 4,
    "kv_heads": 1,
    "mrope": [2, 2, 4],
    "theta": 1e4,
    "latent_size": 7,
    "latent_frames": 3,
    "vit_layers": 2,
    "vit_hidden": 48,
    "vit_ffn": 56,
    "vit_heads": 3,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {
                "hidden": 96,
                "heads": 3,
                "kv_heads": 3,
                "mrope": [4, 6, 6],
                "layers": 1,
                "latent_frames": 2,
            },
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["one key/value head, theta 1e4", "head size 32, one layer"],
)
def test_an_architecture_never_seen_before_is_verified(
    changes: dict[str, object], tmp_path: Path
) -> None:
    """Recorded by a second, independent implementation in fp64 without a cache: other sizes,
    prompts, grids, steps.

    Only some of the tensors that a recording may hold are there.
    """
    with torch.no_grad():
        record(tmp_path, {**SIZES, **changes}, seed=5, steps=3)
    report = verify(tmp_path)
    assert report.ok, report.to_text()
    stages = {row.stage for row in report.rows}
    for task in ("t2i", "t2v", "i2v", "image_edit"):
        assert {f"{task}: positions", f"{task}: velocity", f"{task}: final latents (kv)"} <= stages
    assert "x2t_image: tokens (kv)" in stages


def test_the_number_of_steps_must_be_recorded(tmp_path: Path) -> None:
    """A recording that cannot be replayed is a failure, not a pass."""
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
    """A comparison that left it out would be one of another network."""
    for name in ("golden_fp32.safetensors", *_BESIDE):
        shutil.copyfile(GOLDEN / name, tmp_path / name)
    meta = json.loads((tmp_path / "meta_fp32.json").read_text())
    meta["config"][part]["swirl"] = 3
    (tmp_path / "meta_fp32.json").write_text(json.dumps(meta))
    assert f"config.{part} has unknown settings: swirl" in verify(tmp_path).to_text()
