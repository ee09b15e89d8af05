# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify waypoint` passes for the recorded directory and detects damage to each kind of
file.
"""

import json
import shutil
from pathlib import Path

import pytest
from helpers.golden import golden_folder
from helpers.recordings import change_settings, change_tensor, rewrite
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_omni.testing.parity.waypoint import verify

GOLDEN = golden_folder("waypoint")


def copy(directory: Path, name: str) -> Path:
    """Copy one scenario together with the weights that it requires.

    Return the path to the scenario.
    """
    for path in (GOLDEN / f"{name}.safetensors", *GOLDEN.glob("*_weights.safetensors")):
        shutil.copyfile(path, directory / path.name)
    return directory / f"{name}.safetensors"


def test_every_recorded_scenario_passes() -> None:
    report = verify(GOLDEN)
    assert report.ok, report.to_text()
    recorded = {
        path.stem for path in GOLDEN.glob("*.safetensors") if not path.stem.endswith("_weights")
    }
    assert {row.scenario for row in report.rows} == recorded


@pytest.mark.parametrize(
    ("scenario", "tensor"),
    [
        ("wp15_rollout", "f3.s1.v"),
        ("wp15_rollout", "f0.ring1.k"),
        ("wp15_rollout", "f2.ctrl"),
        ("wp15_rollout_bf16", "f5.latent"),
        ("wp1_prompt_rollout", "prompt1"),
        ("taehv_stream", "decode.raw2"),
        ("wp1_ae", "decode.u8_strided4"),
    ],
)
def test_a_changed_recording_fails(tmp_path: Path, scenario: str, tensor: str) -> None:
    change_tensor(copy(tmp_path, scenario), tensor, 100)
    assert not verify(tmp_path).ok


def test_another_frame_list_fails(tmp_path: Path) -> None:
    path = copy(tmp_path, "wp15_rollout")
    with safe_open(path, "pt") as file:
        frames = json.loads(file.metadata()["frames"])
    frames[5]["visible_history"][0].pop()
    rewrite(path, metadata=lambda values: values | {"frames": json.dumps(frames)})
    report = verify(tmp_path)
    assert any("visible frames" in (row.error or "") for row in report.rows), report.to_text()


def test_every_recorded_argument_of_the_image_encoder_is_used(tmp_path: Path) -> None:
    """An image encoder that was recorded without its unused log-variance head is built without that
    head.
    """
    path = copy(tmp_path, "wp1_ae")
    weights = tmp_path / "wp1_ae_tiny_weights.safetensors"
    retained = {
        name: tensor for name, tensor in load_file(weights).items() if "conv_out_logvar" not in name
    }
    assert len(retained) < len(load_file(weights))
    save_file(retained, weights)
    change_settings(path, "encoder_cfg", skip_logvar=True)
    report = verify(tmp_path)
    assert {row.scenario for row in report.rows if row.ok} == {"wp1_ae"} and report.ok, (
        report.to_text()
    )


@pytest.mark.parametrize(
    ("scenario", "key"),
    [("wp1_ae", "encoder_cfg"), ("wp1_ae", "decoder_cfg"), ("wp15_rollout", "cfg")],
)
def test_an_unknown_recorded_setting_is_refused(tmp_path: Path, scenario: str, key: str) -> None:
    """An unknown recorded setting is refused, because ignoring it would mean comparing a different
    network.
    """
    change_settings(copy(tmp_path, scenario), key, swirl=3)
    report = verify(tmp_path)
    assert f"{key} has unknown settings: swirl" in report.to_text()
