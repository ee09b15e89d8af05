# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify causal_wan` on the recorded directory and on others of other sizes, and that
it notices damage.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from causal_wan_reference import record_self_forcing, record_stream_batch
from helpers.golden import golden_folder
from safetensors.torch import load_file, save_file

from vllm_omni.entrypoints.cli.main import main
from vllm_omni.testing.parity.causal_wan import verify

GOLDEN = golden_folder("wan_causal")
_AUXILIARY = ("sf_meta.json", "sdv2_inputs.safetensors", "tiny_causal_wan_state.safetensors")
CONFIG = {
    "model_type": "t2v",
    "text_len": 7,
    "in_dim": 16,
    "dim": 60,
    "ffn_dim": 44,
    "freq_dim": 12,
    "text_dim": 10,
    "out_dim": 16,
    "num_heads": 3,
    "num_layers": 2,
    "qk_norm": True,
    "cross_attn_norm": True,
    "eps": 1e-5,
    "latent_hw": [6, 4],
}
CASE = {
    "case": "sf_other",
    "local_attn_size": 7,
    "sink_size": 2,
    "num_frame_per_block": 2,
    "chunks": 6,
    "initial_chunks": 0,
    "shift": 3.0,
    "steps": [0, 400, 800],
}
STREAM = {
    "case": "sdv2_stream_other",
    "steps": [700, 450, 100],
    "kv_frames": 8,
    "sink": 2,
    "shift": 5.0,
    "chunks": 8,
}


def copy(directory: Path, *names: str) -> Path:
    for name in (*names, *_AUXILIARY):
        shutil.copyfile(GOLDEN / name, directory / name)
    return directory


def change(path: Path, name: str, amount: float) -> None:
    tensors = load_file(path)
    tensors[name].view(-1)[0] += amount
    save_file(tensors, path)


def test_every_recorded_scenario_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself, as a user runs it."""
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
    "size", [{}, {"sink_size": 0, "local_attn_size": 4}, {"num_frame_per_block": 1, "chunks": 9}]
)
def test_other_sizes_windows_and_step_counts_hold(size: dict[str, Any], tmp_path: Path) -> None:
    """A reference that shares no code with the implementation records directories nobody has
    seen.
    """
    record_self_forcing(tmp_path, {**CASE, **size}, CONFIG)
    report = verify(tmp_path)
    assert report.ok, report.to_text()


@pytest.mark.parametrize(
    "sizes", [{"first": 2, "size": 1}, {"first": 2, "size": 2}, {"first": 3, "size": 1}]
)
def test_other_stream_batches_hold(sizes: dict[str, int], tmp_path: Path) -> None:
    record_self_forcing(tmp_path, CASE, CONFIG)
    (tmp_path / "sf_other.safetensors").unlink()
    record_stream_batch(tmp_path, {**STREAM, **sizes}, CONFIG)
    report = verify(tmp_path)
    assert report.ok, report.to_text()
    assert {row.scenario for row in report.rows} == {"sdv2_stream_other", "sdv2_meta"}


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
def test_a_changed_recording_is_noticed(
    file: str, tensor: str, amount: float, tmp_path: Path
) -> None:
    change(copy(tmp_path, file) / file, tensor, amount)
    report = verify(tmp_path)
    assert [row.scenario for row in report.rows if not row.ok][:1] == [Path(file).stem]


@pytest.mark.parametrize(
    ("tensor", "amount"), [("chunk10.x0", 1e-3), ("final_cache2.k", 1e-3), ("prepare_x0", 1e-3)]
)
def test_a_changed_stream_batch_is_noticed(tensor: str, amount: float, tmp_path: Path) -> None:
    change(
        copy(tmp_path, "sdv2_stream_s2.safetensors", "sdv2_meta.json")
        / "sdv2_stream_s2.safetensors",
        tensor,
        amount,
    )
    assert not verify(tmp_path).ok


def test_another_window_gives_other_results(tmp_path: Path) -> None:
    """The metadata drives the run: change it and the recorded values no longer match."""
    copy(tmp_path, "sf_win9_sink3.safetensors")
    meta = json.loads((tmp_path / "sf_meta.json").read_text())
    meta["cases"]["sf_win9_sink3"]["sink_size"] = 2
    (tmp_path / "sf_meta.json").write_text(json.dumps(meta))
    rows = {row.stage: row for row in verify(tmp_path).rows}
    assert not rows["flow"].ok and rows["flow"].max_abs_diff > 1e-3


def test_a_recording_without_its_metadata_is_a_failure(tmp_path: Path) -> None:
    copy(tmp_path, "sf_full.safetensors")
    (tmp_path / "sf_full.safetensors").rename(tmp_path / "sf_unknown.safetensors")
    (row,) = verify(tmp_path).rows
    assert row.error is not None and "describes no case 'sf_unknown'" in row.error


def test_an_adaptive_stream_batch_is_refused_not_passed(tmp_path: Path) -> None:
    """The original renews sinks by comparing with slots that were never written; that is not
    reproduced.
    """
    copy(tmp_path, "sdv2_stream_s2.safetensors", "sdv2_meta.json")
    (tmp_path / "sdv2_stream_s2.safetensors").rename(tmp_path / "sdv2_stream_s2_adapt.safetensors")
    report = verify(tmp_path)
    assert any(row.error is not None and "fixed sinks" in row.error for row in report.rows)
