# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify lingbot_world` on the recorded directory, and that it notices damage to each
kind of file.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lingbot_reference import record
from lingbot_rollout import GOLDEN, GOLDEN_V2
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_omni.testing.parity.lingbot_world import verify

_AUXILIARY = (
    "dit_inputs.safetensors",
    "dit_tiny_weights.safetensors",
    "vae_tiny_weights_orig_names.safetensors",
)


def copy(directory: Path, *names: str) -> Path:
    """Copy scenario files, and what scenarios read beside themselves."""
    for name in (*names, *_AUXILIARY):
        shutil.copyfile(GOLDEN / name, directory / name)
    return directory


def change(path: Path, name: str, amount: float) -> None:
    """Add `amount` to one value of one recorded tensor."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors[name].view(-1)[0] += amount
    save_file(tensors, path, metadata)


def test_every_recorded_scenario_holds() -> None:
    report = verify(GOLDEN)
    assert report.ok, report.to_text()
    scenarios = {
        path.stem for path in GOLDEN.iterdir() if path.name not in (*_AUXILIARY, "README.md")
    }
    assert {row.scenario for row in report.rows} == scenarios


def test_every_recorded_scenario_of_v2_holds() -> None:
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
def test_a_changed_recording_of_guidance_is_noticed(tensor: str, tmp_path: Path) -> None:
    for path in GOLDEN_V2.glob("pretrain_*"):
        shutil.copyfile(path, tmp_path / path.name)
    change(tmp_path / "pretrain_cfg_c4.safetensors", tensor, 1)
    assert not verify(tmp_path).ok


@pytest.mark.parametrize("tensor", ["relative", "wasd_latent", "camera"])
def test_a_changed_recording_of_controls_is_noticed(tensor: str, tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN_V2 / "act_condition.safetensors", tmp_path / "act_condition.safetensors")
    assert verify(tmp_path).ok
    change(tmp_path / "act_condition.safetensors", tensor, 1e-3)
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
def test_a_changed_recording_is_noticed(
    file: str, tensor: str, amount: float, tmp_path: Path
) -> None:
    change(copy(tmp_path, file) / file, tensor, amount)
    report = verify(tmp_path)
    assert not report.ok
    assert [row.scenario for row in report.rows if not row.ok] == [Path(file).stem]


def test_a_changed_weight_is_noticed(tmp_path: Path) -> None:
    change(
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
def test_another_architecture_gives_other_results(key: str, value: float, tmp_path: Path) -> None:
    """The recording's metadata drives the run: change it and the recorded values no longer
    match.
    """
    path = copy(tmp_path, "dit_window9_sink3_c3.safetensors") / "dit_window9_sink3_c3.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata["cfg"] = json.dumps({**json.loads(metadata["cfg"]), key: value})
    if key == "local_attn_size":
        metadata["kv_size"] = str(int(value) * int(metadata["frame_seqlen"]))
    save_file(load_file(path), path, metadata)
    assert not verify(tmp_path).ok


@pytest.mark.parametrize(
    "name", ["original_v1_fast__shift3", "sglang_v2__shift5", "vllm_omni_v2__shift5"]
)
def test_a_changed_schedule_is_noticed(name: str, tmp_path: Path) -> None:
    tables = json.loads((GOLDEN / "schedule.json").read_text())
    tables[name][1]["t_model"] += 1
    (tmp_path / "schedule.json").write_text(json.dumps(tables))
    assert not verify(tmp_path).ok


@pytest.mark.parametrize("file", _AUXILIARY)
def test_a_missing_companion_is_a_failure(file: str, tmp_path: Path) -> None:
    copy(tmp_path, "dit_window9_sink3_c3.safetensors", "vae.safetensors")
    (tmp_path / file).unlink()
    report = verify(tmp_path)
    assert not report.ok
    assert "could not be run" in report.to_text()


def test_an_unheard_of_control_type_is_a_failure(tmp_path: Path) -> None:
    path = copy(tmp_path, "dit_window9_sink3_c3.safetensors") / "dit_window9_sink3_c3.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata["cfg"] = metadata["cfg"].replace('"cam"', '"pose"')
    save_file(load_file(path), path, metadata)
    assert "control_type = 'pose'" in verify(tmp_path).to_text()


def test_recorded_bf16_stays_bf16() -> None:
    """The bf16 scenario's K/V are bf16 on both sides, so its tolerance is about arithmetic, not
    storage.
    """
    assert load_file(GOLDEN / "dit_global_c3_bf16.safetensors")["c0.kv1.k"].dtype == torch.bfloat16


def test_files_stored_in_bf16_are_read(tmp_path: Path) -> None:
    """Inputs and weights may be stored in bf16; the run is fp32 as the scenario's metadata says."""
    with torch.no_grad():
        record(tmp_path, {**BASE, **SMALL}, seed=3, stored=torch.bfloat16, **SMALL_RUN)
    assert load_file(tmp_path / "dit_inputs.safetensors")["noise"].dtype == torch.bfloat16
    report = verify(tmp_path)
    assert report.ok, report.to_text()


def test_a_file_that_holds_nothing_is_a_failure(tmp_path: Path) -> None:
    path = (
        copy(tmp_path, "dit_window9_sink3_c3.safetensors", "camera.safetensors")
        / "camera.safetensors"
    )
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({}, path, metadata)
    assert "camera run" in " ".join(verify(tmp_path).to_text().split())
    assert not verify(tmp_path).ok


def test_a_second_vae_recording_is_run(tmp_path: Path) -> None:
    """Scenario files may have names of their own: `vae_*.safetensors` like `dit_*.safetensors`."""
    copy(tmp_path, "vae.safetensors")
    (tmp_path / "vae.safetensors").rename(tmp_path / "vae_other.safetensors")
    report = verify(tmp_path)
    assert report.ok, report.to_text()
    assert {row.scenario for row in report.rows} == {"vae_other"}


SMALL = {
    "dim": 8,
    "num_heads": 1,
    "num_layers": 1,
    "ffn_dim": 24,
    "freq_dim": 8,
    "text_dim": 5,
    "text_len": 4,
} | {
    "local_attn_size": 4,
    "sink_size": 0,
}
SMALL_RUN = {"chunk": 4, "chunks": 3, "height": 4, "width": 2}
BASE = {
    "model_type": "i2v",
    "control_type": "cam",
    "patch_size": [1, 2, 2],
    "in_dim": 36,
    "out_dim": 16,
    "qk_norm": True,
    "cross_attn_norm": True,
    "eps": 1e-6,
}


@pytest.mark.parametrize(
    ("sizes", "run"),
    [
        (
            {
                "dim": 72,
                "num_heads": 3,
                "num_layers": 3,
                "ffn_dim": 40,
                "freq_dim": 20,
                "text_dim": 12,
                "text_len": 6,
            }
            | {"local_attn_size": 5, "sink_size": 1},
            {"chunk": 2, "chunks": 5, "height": 2, "width": 6},
        ),
        (SMALL, SMALL_RUN),
        (
            {
                "dim": 24,
                "num_heads": 2,
                "num_layers": 2,
                "ffn_dim": 24,
                "freq_dim": 8,
                "text_dim": 5,
                "text_len": 4,
            }
            | {"local_attn_size": 9, "sink_size": 4},
            {"chunk": 3, "chunks": 5, "height": 2, "width": 4, "attention": 13},
        ),
        (
            {
                "dim": 32,
                "num_heads": 4,
                "num_layers": 2,
                "ffn_dim": 64,
                "freq_dim": 12,
                "text_dim": 24,
                "text_len": 9,
            }
            | {"local_attn_size": -1, "sink_size": 0},
            {"chunk": 1, "chunks": 4, "height": 6, "width": 4},
        ),
    ],
    ids=[
        "three heads, window 5, sink 1",
        "one head, no sink",
        "part of a frame is seen",
        "global, one frame a chunk",
    ],
)
def test_an_architecture_never_seen_before_is_verified(
    sizes: dict[str, int], run: dict[str, int], tmp_path: Path
) -> None:
    """Recorded by a second, independent implementation in fp64 with its own way of keeping K/V."""
    with torch.no_grad():
        record(tmp_path, {**BASE, **sizes}, seed=3, **run)
    report = verify(tmp_path)
    assert report.ok, report.to_text()
    assert {row.stage for row in report.rows} >= {
        "flow",
        "latents",
        "self-attention K/V",
        "cache ends",
        "timesteps",
    }


def test_an_unknown_recorded_setting_of_the_vae_is_refused(tmp_path: Path) -> None:
    """A comparison that left it out would be one of another network."""
    path = copy(tmp_path, "vae.safetensors") / "vae.safetensors"
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    save_file(
        load_file(path),
        path,
        {**metadata, "cfg": json.dumps(json.loads(metadata["cfg"]) | {"swirl": 3})},
    )
    assert "VAE config has unknown keys swirl" in verify(tmp_path).to_text()
