# SPDX-License-Identifier: Apache-2.0
"""The example that uses worlds as environments prints its throughput, forks an environment, and
replays an episode exactly.
"""

from pathlib import Path

import pytest
from helpers.example_scripts import run_example


@pytest.mark.engine
@pytest.mark.nightly
def test_worlds_are_stepped_and_played_again(lingbot_world: Path) -> None:
    size = ("--height", 32, "--width", 48)
    result = run_example("world_env.py", lingbot_world, "--envs", 2, "--steps", 2, *size)
    assert "2 environments, 2 steps: " in result.stdout and "frames per second" in result.stdout
    assert "replayed: 33 frames, the last chunk is equal" in result.stdout
