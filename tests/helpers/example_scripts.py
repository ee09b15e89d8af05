# SPDX-License-Identifier: Apache-2.0
"""Run scripts of `examples/offline_inference`, or import them."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from helpers.scripts import load_script
from helpers.waits import seconds

EXAMPLES = Path(__file__).parents[2] / "examples" / "offline_inference"


def run_example(
    name: str, *arguments: object, status: int = 0
) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end and check its exit status.

    The script must stop its engine. If the engine is left to the interpreter's exit, vLLM often
    warns that the engine has ended unexpectedly.

    Args:
        status: Expected exit status.
    """
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}  # the default that users have
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds(400), check=False, env=environ
    )
    shown = result.stdout[-4000:] + result.stderr[-4000:]
    assert result.returncode == status, f"{name} ended with status {result.returncode}:\n{shown}"
    ending = [line for line in result.stdout.splitlines() if "[shutdown]" in line]
    assert ending and "MPClient: start" in ending[0], f"{name} left its engine running:\n{shown}"
    return result


def load_example(name: str) -> ModuleType:
    """Return the script as a module without running it."""
    return load_script(EXAMPLES / name)
