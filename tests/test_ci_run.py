# SPDX-License-Identifier: Apache-2.0
"""`.ci/run` runs all its steps even if one fails, and the commit selects the nightly shard."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.waits import seconds

SCRIPT = Path(__file__).parent.parent / ".ci" / "run"
STEPS = ["setup", "lint", "test", "nightly"]


def run_ci(
    folder: Path, failing: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with a `make` that only prints its arguments."""
    commands = {"make": f'echo "asked: $*"; [ "$1" != {failing} ]', "apt-get": "exit 1"}
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    environ.pop("NIGHTLY_SHARD", None)
    return subprocess.run(
        ["bash", SCRIPT],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=False,
    )


def shard_of(done: subprocess.CompletedProcess[str]) -> str:
    """The shard that the run announced and started, once."""
    [announced] = re.findall(r"^nightly shard (\d/8), selected by .*", done.stdout, re.M)
    assert re.findall(r"^asked: nightly SHARD=(\S+)", done.stdout, re.M) == [announced]
    return announced


@pytest.mark.parametrize("failing", [None, *STEPS])
def test_every_step_runs_and_a_failure_is_reported(tmp_path: Path, failing: str | None) -> None:
    done = run_ci(tmp_path, failing)
    requested = re.findall(r"^asked: (\w+)", done.stdout, re.M)
    assert requested == STEPS
    outcomes = re.findall(r"^ *\d+ s  (\w+)  make (\w+)", done.stdout, re.M)
    assert [(name, outcome == "FAILED") for outcome, name in outcomes] == [
        (name, name == failing) for name in STEPS
    ]
    assert done.returncode == (failing is not None)


def test_the_commit_selects_the_nightly_shard(tmp_path: Path) -> None:
    """The same one in every run of a commit, and each of the eight for some commit."""
    assert shard_of(run_ci(tmp_path)) == shard_of(run_ci(tmp_path))
    git = tmp_path / "git"
    shards = set()
    for digit in "01234567":
        git.write_text(f"#!/bin/sh\necho 0000000{digit}ffff\n")
        git.chmod(0o755)
        shards.add(shard_of(run_ci(tmp_path)))
    assert shards == {f"{number}/8" for number in range(1, 9)}


def test_a_variable_repeats_the_shard_of_another_commit(tmp_path: Path) -> None:
    assert shard_of(run_ci(tmp_path, NIGHTLY_SHARD="3/8")) == "3/8"


def test_without_a_commit_the_date_selects_the_shard(tmp_path: Path) -> None:
    """As in an archive of the tree."""
    (tmp_path / "git").write_text("#!/bin/sh\nexit 128\n")
    (tmp_path / "git").chmod(0o755)
    assert shard_of(run_ci(tmp_path))[1:] == "/8"
