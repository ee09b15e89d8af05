# SPDX-License-Identifier: Apache-2.0
"""The example that trains a policy over HTTP learns to walk in the demo world, even in a shortened
run.
"""

import json
from pathlib import Path

import helpers.needs_gymnasium  # noqa: F401
import pytest
from helpers.quick_programs import run_python
from helpers.waits import seconds

SCRIPT = Path(__file__).parents[2] / "examples" / "online_serving" / "train_policy.py"


@pytest.mark.nightly
def test_a_policy_learns_to_walk_to_a_landmark(tmp_path: Path) -> None:
    """The trained policy ends at least one metre closer to the landmark than a policy that presses
    random keys. Six steps forward cover three metres.
    """
    result = tmp_path / "result.json"
    short = ("--envs", 4, "--steps", 6, "--iterations", 8)
    ran = run_python(SCRIPT, *short, "--result", result, limit_s=seconds(600))
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    closer = json.loads(result.read_text())["metres_closer"]
    assert closer["trained"]["mean"] > closer["random"]["mean"] + 1.0, ran.stdout
