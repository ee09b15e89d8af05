# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni bench --check` runs benchmarks in separate processes and compares their results with
the recorded ones.
"""

import json
from pathlib import Path

import pytest

from vllm_omni.entrypoints.cli import bench, bench_check
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.planning import baselines
from vllm_omni.planning.baselines import Baseline, BaselineCheck, BaselineValue, Machine

SCRIPT = '''"""Take the given time."""
import argparse, json, sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--ms", type=float)
parser.add_argument("--fail", action="store_true")
parser.add_argument("--out", type=Path)
args = parser.parse_args()
print("chatter")
if args.fail:
    sys.exit("no device")
(args.out / "2026_timed.json").write_text(json.dumps({"result": {"chunk_ms": args.ms}}))
'''
HERE = Machine("EPYC", 2)


def row(name: str, *arguments: str, cores: int = 2) -> Baseline:
    return Baseline(
        name,
        f"row {name}",
        "2026-01-01",
        "0",
        "python benchmarks/timed.py",
        "EPYC",
        cores,
        None,
        0,
        (BaselineValue("chunk, ms", (100.0,)),),
        BaselineCheck("timed", arguments, "chunk_ms", "chunk, ms"),
    )


ROWS = (
    row("equal", "--ms", "104"),
    row("slow", "--ms", "200"),
    row("elsewhere", "--ms", "200", cores=64),
    row("broken", "--fail"),
)


@pytest.fixture(autouse=True)
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an installation from a wheel on a known machine: the benchmarks and recorded results
    are present, but there is no checkout.
    """
    folder = tmp_path / "share"
    folder.mkdir()
    (folder / "common.py").write_text("")
    (folder / "timed.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_CHECKOUT", tmp_path / "elsewhere")
    monkeypatch.setattr(bench, "_INSTALLED", folder)
    monkeypatch.setattr(bench_check, "machine_at_hand", lambda: HERE)
    for module in (baselines, bench_check):
        monkeypatch.setattr(module, "all_baselines", lambda: ROWS)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    return int(end.value.code or 0)


def test_the_row_of_this_machine_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """If no names are given, the check runs only one row per benchmark: the row recorded on
    hardware like this machine's.
    """
    assert run("--check") == 0
    out, err = capsys.readouterr()
    assert "this machine: 2 cores of EPYC; rows: 1" in err
    assert out == (
        "row equal\n    chunk_ms: 104.0, recorded 100.0 on 2 cores of EPYC (2026-01-01); ratio "
        "1.040; same hardware; within 25 %\n"
    )


def test_slower_than_the_same_hardware_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--check", "slow", "elsewhere") == 1
    out = capsys.readouterr().out
    assert "ratio 2.000; same hardware; SLOWER than recorded by more than 25 %" in out
    assert "on 64 cores of EPYC (2026-01-01); ratio 2.000; other hardware; not comparable" in out
    assert run("--check", "elsewhere") == 0


def test_a_failed_benchmark_is_status_1_and_its_end_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After a failed benchmark, the remaining rows still run. The exit status is 1, and the end of
    the failed benchmark's output is shown.
    """
    assert run("--json", "--check", "broken", "equal") == 1
    out, err = capsys.readouterr()
    assert "broken: the benchmark ended with 1" in err and "    no device" in err
    document = json.loads(out)
    assert document["failed"] == ["broken"]
    assert [one["verdict"] for one in document["rows"]] == ["within"]


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--check", "nothing") == 2
    assert "rows with a check: equal, slow, elsewhere, broken" in capsys.readouterr().err
