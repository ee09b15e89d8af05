# SPDX-License-Identifier: Apache-2.0
"""`run_example`: a script of `examples/offline_inference` as a user types it."""

import subprocess
import sys
from pathlib import Path

from helpers.waits import seconds

EXAMPLES = Path(__file__).parents[2] / "examples" / "offline_inference"


def run_example(name: str, *arguments: object, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run it to its end; status: how it must end.

    It must have stopped its engine by itself. vLLM ends one that is left to the interpreter's exit from two threads at
    once, and once in some hundred runs the process aborts.
    """
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds(600), check=False)
    written = result.stdout[-4000:] + result.stderr[-4000:]
    assert result.returncode == status, f"{name} ended with status {result.returncode}:\n{written}"
    assert "exited unexpectedly" not in written, f"{name} left its engine running:\n{written}"
    return result
