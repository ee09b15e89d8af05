# SPDX-License-Identifier: Apache-2.0
"""Runs or imports scripts from `examples/offline_inference`."""

import subprocess
from pathlib import Path
from types import ModuleType

from helpers.quick_programs import run_python
from helpers.scripts import load_script

EXAMPLES = Path(__file__).parents[2] / "examples" / "offline_inference"


def run_example(
    name: str, *arguments: object, status: int = 0
) -> "subprocess.CompletedProcess[str]":
    """Run a script to completion and check its exit status.

    The script must stop its engine. If the engine stops only when the interpreter exits, vLLM often
    warns that the engine has died unexpectedly.

    Args:
        status: Expected exit status.
    """
    environ = {"VLLM_LOGGING_LEVEL": "INFO"}  # the default log level for users
    result = run_python(EXAMPLES / name, *arguments, limit_s=400, environ=environ)
    shown = result.stdout[-4000:] + result.stderr[-4000:]
    assert result.returncode == status, f"{name} ended with status {result.returncode}:\n{shown}"
    ending = [line for line in result.stdout.splitlines() if "[shutdown]" in line]
    assert ending and "MPClient: start" in ending[0], f"{name} left its engine running:\n{shown}"
    return result


def load_example(name: str) -> ModuleType:
    """Return the script as a module without running it."""
    return load_script(EXAMPLES / name)
