# SPDX-License-Identifier: Apache-2.0
"""The example of worlds as environments runs as its own command line: throughput, a fork, an exact replay."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waits import seconds

SCRIPT = Path(__file__).parents[2] / "examples" / "offline_inference" / "world_env.py"


@pytest.mark.engine
@pytest.mark.nightly
def test_worlds_are_stepped_and_played_again(lingbot_world: Path) -> None:
    command = [sys.executable, SCRIPT, lingbot_world, "--envs", "2", "--steps", "2", "--height", "32", "--width", "48"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=seconds(600), check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "2 environments, 2 steps: " in result.stdout and "frames a second" in result.stdout
    assert "played again: 33 frames, the last chunk equal" in result.stdout
