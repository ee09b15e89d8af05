# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify causal_wan` passes for the recorded directory and detects damage to it."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.golden import golden_folder
from helpers.recordings import change_tensor

from vllm_omni.entrypoints.cli.main import main
from vllm_omni.testing.parity.causal_wan import verify

GOLDEN = golden_folder("wan_causal")
_AUXILIARY = ("sf_meta.json", "sdv2_inputs.safetensors", "tiny_causal_wan_state.safetensors")


def copy(directory: Path, *names: str) -> Path:
    for name in (*names, *_AUXILIARY):
        shutil.copyfile(GOLDEN / name, directory / name)
    return directory


def test_every_recorded_scenario_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """The verify command passes for every recorded scenario."""
    with pytest.raises(SystemExit) as end:
        main(["verify", "causal_wan", "--golden", str(GOLDEN), "--json"])
    assert end.value.code == 0
    report = json.loads(capsys.readouterr().out)
    scenarios = {
        path.stem for path in GOLDEN.iterdir() if path.name not in (*_AUXILIARY, "README.md")
    }
    assert report["ok"] and {row["scenario"] for row in report["rows"]} == scenarios
    allowed = {
        row["tolerance"]
        for row in report["rows"]
        if row["stage"] in ("flow", "predicted clean latents")
    }
    assert allowed == {1e-5, 2e-5}


@pytest.mark.parametrize(
    ("file", "tensor", "amount"),
    [
        ("sf_win9_sink3.safetensors", "call17.flow", 1e-4),
        ("sf_win9_sink3.safetensors", "call29.cache2.v", 1e-4),
        ("sf_frame_win4_sink1.safetensors", "latents", 1e-4),
        ("sf_prefill_win6.safetensors", "initial_latent", 1e-2),
        ("bidirectional_wan.safetensors", "out", 1e-4),
    ],
)
def test_a_changed_recording_fails(file: str, tensor: str, amount: float, tmp_path: Path) -> None:
    change_tensor(copy(tmp_path, file) / file, tensor, amount)
    report = verify(tmp_path)
    assert [row.scenario for row in report.rows if not row.ok][:1] == [Path(file).stem]


@pytest.mark.parametrize(
    ("tensor", "amount"), [("chunk10.x0", 1e-3), ("final_cache2.k", 1e-3), ("prepare_x0", 1e-3)]
)
def test_a_changed_stream_batch_fails(tensor: str, amount: float, tmp_path: Path) -> None:
    change_tensor(
        copy(tmp_path, "sdv2_stream_s2.safetensors", "sdv2_meta.json")
        / "sdv2_stream_s2.safetensors",
        tensor,
        amount,
    )
    assert not verify(tmp_path).ok


def test_the_metadata_defines_the_window(tmp_path: Path) -> None:
    """Verification fails if the metadata and the recording differ in the number of sinks."""
    copy(tmp_path, "sf_win9_sink3.safetensors")
    meta = json.loads((tmp_path / "sf_meta.json").read_text())
    meta["cases"]["sf_win9_sink3"]["sink_size"] = 2
    (tmp_path / "sf_meta.json").write_text(json.dumps(meta))
    rows = {row.stage: row for row in verify(tmp_path).rows}
    assert not rows["flow"].ok and rows["flow"].max_abs_diff > 1e-3


def test_a_recording_without_its_metadata_fails(tmp_path: Path) -> None:
    copy(tmp_path, "sf_full.safetensors")
    (tmp_path / "sf_full.safetensors").rename(tmp_path / "sf_unknown.safetensors")
    (row,) = verify(tmp_path).rows
    assert row.error is not None and "describes no case 'sf_unknown'" in row.error


def test_an_adaptive_stream_batch_is_refused(tmp_path: Path) -> None:
    """A recorded batch of adaptive streams is refused. The original implementation compares its
    sinks with slots that were never written, and this package does not reproduce that comparison.
    """
    copy(tmp_path, "sdv2_stream_s2.safetensors", "sdv2_meta.json")
    (tmp_path / "sdv2_stream_s2.safetensors").rename(tmp_path / "sdv2_stream_s2_adapt.safetensors")
    report = verify(tmp_path)
    assert any(row.error is not None and "fixed sinks" in row.error for row in report.rows)
