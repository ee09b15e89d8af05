# SPDX-License-Identifier: Apache-2.0
"""Dispatch, exit status and imports of the `vllm-omni` command."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waits import seconds

from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.model_executor.models import registry
from vllm_omni.testing import parity


def exit_code(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    "argv", [["--version"], ["--help"], ["demo", "--help"], ["make-tiny", "--help"]]
)
def test_help_loads_neither_torch_nor_vllm(argv: list[str]) -> None:
    """Printing the help imports neither torch nor vLLM, so the help appears immediately."""
    code = (
        "import sys, json\nfrom vllm_omni.entrypoints.cli.main import main\n"
        f"try: main({argv!r})\nexcept SystemExit as end: code = end.code\n"
        "print(json.dumps([code or 0, sorted({'torch', 'vllm', 'transformers', 'av'} & "
        "set(sys.modules))]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=seconds(300),
        check=True,
    )
    assert json.loads(result.stdout.splitlines()[-1]) == [0, []]


def test_version_names_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the versions of this package, vLLM and torch, which a bug report needs."""
    assert exit_code("--version") == 0
    out = capsys.readouterr().out
    assert all(
        name in out
        for name in ("vllm-worlds 0.", f"vllm {importlib.metadata.version('vllm')}", "torch 2.")
    )


def test_serve_is_reached_from_both_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm serve DIR --omni` and `vllm-omni serve DIR` are equivalent, and `--omni` may be in any
    position.
    """
    seen: list[list[str]] = []
    monkeypatch.setattr(serve, "run", lambda argv: seen.append(argv) or 0)
    for argv in (
        ["serve", "DIR", "--omni", "-tp", "2"],
        ["--omni", "serve", "DIR", "-tp", "2"],
        ["serve", "DIR", "-tp", "2"],
    ):
        assert exit_code(*argv) == 0
    assert seen == [["DIR", "-tp", "2"]] * 3


def test_omni_with_another_command_runs_stock_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`vllm bench ... --omni` runs the stock command and notes that the flag has no effect."""
    import vllm.entrypoints.cli.main as stock

    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["vllm", "bench", "latency", "--omni"])
    monkeypatch.setattr(stock, "main", lambda: seen.append(sys.argv))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert seen == [["vllm", "bench", "latency"]]
    assert "--omni has no effect on the vllm command 'bench'" in capsys.readouterr().err


def test_make_tiny_writes_a_checkpoint_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make-tiny` writes a directory that is recognised as the requested family, and never
    overwrites a file.
    """
    out = tmp_path / "world"
    assert exit_code("make-tiny", "null_world", str(out)) == 0
    assert f"vllm serve {out} --omni" in capsys.readouterr().out
    assert registry.get_family("null_world").detect(out)
    assert exit_code("make-tiny", "null_world", str(out)) == 2
    assert "exists and is not an empty directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["make-tiny", "no_such", "x"], "unknown model 'no_such'; known: "),
        (
            ["make-tiny", "null_world", "x", "--layout", "odd"],
            "unknown layout 'odd' for null_world; allowed: original",
        ),
        (["make-tiny", "null_world", "x", "--seed", "-1"], "--seed must be from 0"),
        (["verify", "no_such", "--golden", "x"], "unknown model 'no_such'; known: "),
        (["verify", "null_world", "--golden", "x"], "null_world has no golden comparison"),
        (["download", "null_world"], "null_world has no released weights"),
        (["demo", "--chunks", "0"], "--chunks must be >= 1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    argv: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The error line states the invalid value, the allowed values and the remedy."""
    monkeypatch.chdir(tmp_path)
    assert exit_code(*argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-omni: error: ")
    assert error.count("\n") == 1
    assert complaint in error


class FakeReport:
    """A simulated parity report."""

    def __init__(self, ok: bool) -> None:
        self.ok = ok

    def to_text(self) -> str:
        return "a table"

    def to_json(self) -> str:
        return "{}"


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_verify_fails_when_the_report_does(
    ok: bool,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The exit status of `verify` reflects the result of its report, whether the report is printed
    as text or as JSON.
    """
    monkeypatch.setattr(parity, "verify", lambda family, golden: FakeReport(ok))
    assert exit_code("verify", "lance", "--golden", str(tmp_path)) == status
    assert capsys.readouterr().out == "a table\n"
    assert exit_code("verify", "lance", "--golden", str(tmp_path), "--json") == status
    assert json.loads(capsys.readouterr().out) == {}
    assert exit_code("verify", "lance", "--golden", str(tmp_path / "nowhere")) == 2
