# SPDX-License-Identifier: Apache-2.0
"""`scripts/start_tiny_models.py` says whether a model ran, from what its process printed."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script

SCRIPT = Path(__file__).parent.parent / "scripts" / "start_tiny_models.py"
LINE = '{"model": "world", "vllm": "9.9.9", "digest": "00"}'


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.mark.parametrize(
    ("printed", "status", "ran"),
    [
        (f"a log line\n{LINE}\nworkers still running after grace period\n", 0, True),
        (f"{LINE}\nTraceback: it broke while it stopped\n", 1, False),
        ("a log line\n", 0, False),
    ],
)
def test_a_model_ran_if_its_process_says_so_and_ends_well(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    printed: str,
    status: int,
    ran: bool,
) -> None:
    """Its line alone is printed; otherwise the end of its log is."""
    response = subprocess.CompletedProcess([], status, stdout=printed)
    monkeypatch.setattr(script.subprocess, "run", lambda *args, **kwargs: response)
    assert script.start("world", 1.0) == ran
    out = capsys.readouterr().out
    assert (
        out == f"{LINE}\n"
        if ran
        else out.startswith("world: exit status") and printed.strip() in out
    )


def test_a_model_that_hangs_is_ended(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its limit, with what it had printed."""

    def hang(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired([], 3.0, output=b"the last words\n")

    monkeypatch.setattr(script.subprocess, "run", hang)
    assert not script.start("ar", 3.0)
    assert capsys.readouterr().out == "ar: more than 3 s\nthe last words\n"


def test_an_unknown_model_is_one_line() -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, "nonsense"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr == "there is no model nonsense; there are world, stream, ar\n"
