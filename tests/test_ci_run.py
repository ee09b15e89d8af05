# SPDX-License-Identifier: Apache-2.0
"""`.ci/run` goes through all its steps, whatever becomes of one, and its status says whether all passed."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.waits import seconds

SCRIPT = Path(__file__).parent.parent / ".ci" / "run"
STEPS = ["setup", "lint", "test", "nightly"]


@pytest.mark.parametrize("failing", [None, *STEPS])
def test_every_step_runs_and_a_failure_is_told(tmp_path: Path, failing: str | None) -> None:
    """With a `make` that only says what it was asked for."""
    commands = {"make": f'echo "asked: $*"; [ "$1" != {failing} ]', "apt-get": "exit 1"}
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", SCRIPT], env=environ, capture_output=True, text=True, timeout=seconds(60), check=False
    )
    asked = re.findall(r"^asked: (\w+)(?: SHARD=(\d)/8)?", done.stdout, re.M)
    assert [name for name, _ in asked][:4] == STEPS and {name for name, _ in asked[4:]} <= {"nightly"}
    assert all(shard for name, shard in asked if name == "nightly")
    outcomes = re.findall(r"^ *\d+ s  (\w+)  make (\w+)", done.stdout, re.M)
    assert [(name, outcome == "FAILED") for outcome, name in outcomes] == [(name, name == failing) for name, _ in asked]
    assert done.returncode == (failing is not None)
