# SPDX-License-Identifier: Apache-2.0
"""The comparison with other engines: resumed runs, time limits, and the table."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.peers import run
from benchmarks.peers.parts import PARTS
from benchmarks.peers.run import DRIVERS, PartRunner
from benchmarks.peers.table import TableError, load, table_text

REPO = Path(__file__).parents[1]
RECORDED = sorted((REPO / "benchmarks" / "results").glob("2026-11-28_peers_*.json"))
SECOND_GPU = "second H200 of 2026-11-28"


def recorded_on(gpu: str, folder: Path) -> Path:
    """Copy the recorded results of one GPU into `folder`."""
    for path in RECORDED:
        if json.loads(path.read_text())["hardware"]["gpu_ids"] == [gpu]:
            shutil.copy(path, folder)
    return folder


def test_the_table_has_ratios_to_this_project_on_the_same_gpu(tmp_path: Path) -> None:
    """The fastest part comes first, and each ratio is a median divided by that of `ours_bf16`."""
    text = table_text(load([recorded_on(SECOND_GPU, tmp_path)]))
    rows = [line.split(" | ")[:5] for line in text.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        ["| ours_fp8", "vllm_omni (this project)", "1297 (1292 to 1300)", "0.73", "9.25"],
        ["| ours_bf16", "vllm_omni (this project)", "1786 (1762 to 1798)", "1.00", "6.72"],
        ["| sglang_best", "SGLang 0.5.23", "2252 (2220 to 2294)", "1.26", "5.33"],
        ["| telefuser_best", "TeleFuser 0.1.0.post3", "2343 (2337 to 2348)", "1.31", "5.12"],
        ["| flashdreams", "FlashDreams d5c4ce0", "2439 (2429 to 2446)", "1.37", "4.92"],
    ]
    assert "RMSNorm by sglang's own JIT kernel" in text


def test_results_of_two_gpus_are_not_compared() -> None:
    """GPUs of one model differ by several percent, so the UUID counts and not only the name."""
    with pytest.raises(TableError, match=r"results of 2 GPUs cannot be compared.*one GPU"):
        load([REPO / "benchmarks" / "results"])


def test_a_part_with_a_result_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison resumes where it stopped, and a part that is killed leaves no result."""
    started = tmp_path / "started"
    script = f"""import json, pathlib, sys, time
log = pathlib.Path({str(started)!r})
log.write_text(log.read_text() + "x" if log.exists() else "x")
time.sleep(600 * (len(log.read_text()) == 1))
result = {{"versions": {{}}, "result": {{"chunk_ms": 1.0}}}}
pathlib.Path(sys.argv[1]).write_text(json.dumps(result))
"""
    runner = PartRunner(tmp_path, tmp_path, None, "abc")
    monkeypatch.setattr(run, "gpus", list)
    monkeypatch.setattr(
        PartRunner,
        "command",
        lambda self, part, scratch: (
            [sys.executable, "-c", script, str(scratch / "measured.json")],
            {},
        ),
    )
    assert not runner.run("sglang_best", limit_s=2)
    assert not (tmp_path / "sglang_best.json").exists()
    assert runner.run("sglang_best")
    assert (
        json.loads((tmp_path / "sglang_best.json").read_text())["result"]["part"] == "sglang_best"
    )
    assert runner.run("sglang_best")
    assert started.read_text() == "xx"
    assert runner.run("sglang_best", again=True)
    assert started.read_text() == "xxx"


def test_each_part_has_its_script() -> None:
    for part in PARTS.values():
        assert any((folder / part.script).exists() for folder in (DRIVERS, REPO / "benchmarks"))
