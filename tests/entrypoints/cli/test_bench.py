# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni bench` lists and runs the benchmarks in a checkout and compares two result files."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.entrypoints.cli import bench
from vllm_omni.entrypoints.cli.main import main

SCRIPT = '''"""Counts to three.

More.
"""
import argparse, json, sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--fail", action="store_true")
parser.add_argument("--out", type=Path)  # as add_output_arguments( does
args = parser.parse_args()
print("chatter")
(args.out / "2026_count.json").write_text(json.dumps({"wall_ms": 3}))
sys.exit(3 if args.fail else 0)
'''


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    return int(end.value.code or 0)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout that contains one benchmark and is the current directory. The package is
    installed elsewhere.
    """
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "common.py").write_text("")
    (folder / "helper.py").write_text("x = 1")
    (folder / "count.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_CHECKOUT", tmp_path / "elsewhere")
    return tmp_path


def test_the_repositorys_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every script that writes a result is listed together with what it measures. Helper scripts
    are not listed.
    """
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines}
    assert {
        "engine_overhead",
        "diffusers_executor",
        "lingbot_world",
    } <= names and "common" not in names
    assert all(len(line.split()) > 3 for line in lines)


def test_a_benchmark_runs_with_its_own_arguments_and_status(
    checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A benchmark's output is passed through, and the command fails if the benchmark fails."""
    assert run("count", "--out", str(checkout)) == 0
    assert capfd.readouterr().out == "chatter\n"
    assert run("count", "--out", str(checkout), "--fail") == 3


def test_json_prints_the_result_and_nothing_else(
    checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With `--json`, stdout contains only the result, so programs can parse it, and all other
    output goes to stderr.
    """
    assert run("--json", "count") == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"wall_ms": 3} and "chatter" in captured.err
    assert run("--json", "count", "--fail") == 3


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("compare", "one.json"), ("compare", "no.json", "none.json")]
)
def test_mistakes_end_with_one_line(
    checkout: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_without_a_checkout_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outside a checkout, a package that was not installed from its wheel has no benchmarks, and
    the command reports this.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(bench, "_INSTALLED", tmp_path)
    assert run() == 2
    assert "this installation has no benchmarks" in capsys.readouterr().err


def write(path: Path, **content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def results(tmp_path: Path) -> tuple[str, str]:
    """Return the paths of two result files that differ as follows: the rows are in a different
    order, a time and a rate are worse, a count has changed, a row is new, and the torch versions
    differ.
    """
    common = {"date": "2026-01-01", "versions": {"torch": "2"}}
    slow = {"name": "slow", "wall_ms": {"p50": 10.0}}
    fast = {"name": "fast", "wall_ms": {"p50": 2.0}, "fps": 30}
    before = write(tmp_path / "a.json", **common, rows=[slow, fast], frames=12)
    after = write(
        tmp_path / "b.json",
        **{**common, "versions": {"torch": "3"}},
        rows=[
            {**fast, "fps": 24},
            {**slow, "wall_ms": {"p50": 11.0}},
            {"name": "new", "wall_ms": {"p50": 1.0}},
        ],
        frames=13,
    )
    return before, after


def test_compare_matches_rows_by_their_texts(
    results: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are matched by their texts rather than by position. The unit in a value's name
    determines whether lower or higher is better. Differing software versions are reported
    separately.
    """
    assert run("--json", "compare", *results) == 0
    document = json.loads(capsys.readouterr().out)
    changes = {row["name"]: row for row in document["changes"]}
    assert changes["rows[slow].wall_ms.p50"]["percent"] == pytest.approx(10)
    worse = {name: row["worse"] for name, row in changes.items()}
    assert worse == {
        "rows[slow].wall_ms.p50": True,
        "rows[fast].wall_ms.p50": False,
        "rows[fast].fps": True,
        "frames": None,
    }
    assert document["only_in_one"] == ["rows[new].wall_ms.p50"] and document["differing"] == [
        "versions"
    ]


@pytest.mark.parametrize(("threshold", "status"), [("5", 1), ("15", 1), ("25", 0)])
def test_a_threshold_makes_it_a_gate(results: tuple[str, str], threshold: str, status: int) -> None:
    """The command fails if a value is worse by more than the threshold. The second result
    shows 10 % more time and 20 % fewer frames per second than the first. `--threshold` may also
    follow `compare`.
    """
    assert run("--threshold", threshold, "compare", *results) == status
    assert run("compare", "--threshold", threshold, *results) == status


def test_compare_prints_a_table(
    results: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The table shows the old and new values, the change, and a warning if the two results were
    produced under different conditions.
    """
    assert run("compare", *results) == 0
    text = capsys.readouterr().out
    assert (
        "+10.0 %  worse" in text and "differ in versions" in text and "only in one of them" in text
    )


def test_results_of_different_benchmarks_are_refused(tmp_path: Path) -> None:
    """Results of different benchmarks are rejected, because they have no values in common to
    compare.
    """
    assert run("compare", write(tmp_path / "a.json", x=1), write(tmp_path / "b.json", y=1)) == 2
