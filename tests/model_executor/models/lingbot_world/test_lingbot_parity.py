# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify lingbot_world` passes for the recorded directory and detects damage to each
kind of file.
"""

import json
import shutil
from pathlib import Path

import pytest
from helpers.recordings import change_settings, change_tensor, rewrite
from lingbot_rollout import GOLDEN, GOLDEN_V2

from vllm_omni.testing.parity.lingbot_world import verify

_AUXILIARY = (
    "dit_inputs.safetensors",
    "dit_tiny_weights.safetensors",
    "vae_tiny_weights_orig_names.safetensors",
)


def copy(directory: Path, *names: str) -> Path:
    """Copy scenario files, and the files that they require, to `directory`."""
    for name in (*names, *_AUXILIARY):
        shutil.copyfile(GOLDEN / name, directory / name)
    return directory


def test_every_recorded_scenario_passes() -> None:
    report = verify(GOLDEN)
    assert report.ok, report.to_text()
    scenarios = {
        path.stem for path in GOLDEN.iterdir() if path.name not in (*_AUXILIARY, "README.md")
    }
    assert {row.scenario for row in report.rows} == scenarios


def test_every_recorded_scenario_of_v2_passes() -> None:
    report = verify(GOLDEN_V2)
    assert report.ok, report.to_text()
    assert {row.scenario for row in report.rows} == {
        "act_condition",
        "dit_act_v2_c4",
        "pretrain_cfg_c4",
    }


@pytest.mark.parametrize(
    "tensor", ["c0.s0.cond", "c1.s20.x_next", "c2.latent", "kv1.uncond.k", "sched.timesteps"]
)
def test_a_changed_recording_of_guidance_fails(tensor: str, tmp_path: Path) -> None:
    for path in GOLDEN_V2.glob("pretrain_*"):
        shutil.copyfile(path, tmp_path / path.name)
    change_tensor(tmp_path / "pretrain_cfg_c4.safetensors", tensor, 1)
    assert not verify(tmp_path).ok


@pytest.mark.parametrize("tensor", ["relative", "wasd_latent", "camera"])
def test_a_changed_recording_of_controls_fails(tensor: str, tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN_V2 / "act_condition.safetensors", tmp_path / "act_condition.safetensors")
    assert verify(tmp_path).ok
    change_tensor(tmp_path / "act_condition.safetensors", tensor, 1e-3)
    assert not verify(tmp_path).ok


@pytest.mark.parametrize(
    ("file", "tensor", "amount"),
    [
        ("dit_window7_sink2_c3.safetensors", "c4.s3.flow", 1e-4),
        ("dit_window7_sink2_c3.safetensors", "c2.kv1.v", 1e-4),
        ("dit_window7_sink2_c3.safetensors", "c3.latent", 1e-3),
        ("dit_window7_sink2_c3.safetensors", "c3.ends", 1),
        ("dit_window7_sink2_c3.safetensors", "sched.timesteps", 1),
        ("dit_global_c3.safetensors", "xattn0.k", 1e-4),
        ("dit_global_c3_bf16.safetensors", "c2.s1.flow", 1.0),
        ("camera.safetensors", "f25.rel", 1e-4),
        ("camera.safetensors", "full.values", 1e-4),
        ("camera.safetensors", "act.sglang_chunk2", 1e-4),
        ("vae.safetensors", "cond_latent", 1e-3),
        ("vae.safetensors", "pr3701_warm_decode_chunk1", 1e-3),
    ],
)
def test_a_changed_recording_fails(file: str, tensor: str, amount: float, tmp_path: Path) -> None:
    change_tensor(copy(tmp_path, file) / file, tensor, amount)
    report = verify(tmp_path)
    assert not report.ok
    assert [row.scenario for row in report.rows if not row.ok] == [Path(file).stem]


def test_a_changed_weight_fails(tmp_path: Path) -> None:
    change_tensor(
        copy(tmp_path, "dit_window9_sink3_c3.safetensors") / _AUXILIARY[1],
        "blocks.1.cam_shift_layer.bias",
        1e-3,
    )
    assert not verify(tmp_path).ok


@pytest.mark.parametrize(
    ("key", "value"),
    [("sink_size", 2), ("local_attn_size", 8), ("eps", 1e-2)],
    ids=["sink", "window", "eps"],
)
def test_the_metadata_defines_the_architecture(key: str, value: float, tmp_path: Path) -> None:
    """Verification fails if the metadata describes a different architecture from the
    recording's.
    """
    path = copy(tmp_path, "dit_window9_sink3_c3.safetensors") / "dit_window9_sink3_c3.safetensors"
    change_settings(path, "cfg", **{key: value})
    if key == "local_attn_size":
        rewrite(path, metadata=lambda m: m | {"kv_size": str(int(value) * int(m["frame_seqlen"]))})
    assert not verify(tmp_path).ok


@pytest.mark.parametrize(
    "name", ["original_v1_fast__shift3", "sglang_v2__shift5", "vllm_omni_v2__shift5"]
)
def test_a_changed_schedule_fails(name: str, tmp_path: Path) -> None:
    tables = json.loads((GOLDEN / "schedule.json").read_text())
    tables[name][1]["t_model"] += 1
    (tmp_path / "schedule.json").write_text(json.dumps(tables))
    assert not verify(tmp_path).ok


@pytest.mark.parametrize("file", _AUXILIARY)
def test_a_missing_companion_file_fails(file: str, tmp_path: Path) -> None:
    copy(tmp_path, "dit_window9_sink3_c3.safetensors", "vae.safetensors")
    (tmp_path / file).unlink()
    report = verify(tmp_path)
    assert not report.ok
    assert "could not be run" in report.to_text()


def test_an_unknown_control_type_fails(tmp_path: Path) -> None:
    path = copy(tmp_path, "dit_window9_sink3_c3.safetensors") / "dit_window9_sink3_c3.safetensors"
    change_settings(path, "cfg", control_type="pose")
    assert "control_type = 'pose'" in verify(tmp_path).to_text()


def test_an_empty_file_fails(tmp_path: Path) -> None:
    path = (
        copy(tmp_path, "dit_window9_sink3_c3.safetensors", "camera.safetensors")
        / "camera.safetensors"
    )
    rewrite(path, lambda tensors: {})
    assert "camera run" in " ".join(verify(tmp_path).to_text().split())
    assert not verify(tmp_path).ok


def test_a_second_vae_recording_is_compared(tmp_path: Path) -> None:
    """A second VAE recording is compared too, because every file that matches `vae_*.safetensors`
    or `dit_*.safetensors` is a scenario.
    """
    copy(tmp_path, "vae.safetensors")
    (tmp_path / "vae.safetensors").rename(tmp_path / "vae_other.safetensors")
    report = verify(tmp_path)
    assert report.ok, report.to_text()
    assert {row.scenario for row in report.rows} == {"vae_other"}


def test_an_unknown_recorded_setting_of_the_vae_is_refused(tmp_path: Path) -> None:
    """An unknown recorded VAE setting is refused, because ignoring it would mean comparing a
    different network.
    """
    path = copy(tmp_path, "vae.safetensors") / "vae.safetensors"
    change_settings(path, "cfg", swirl=3)
    assert "VAE config has unknown keys swirl" in verify(tmp_path).to_text()
