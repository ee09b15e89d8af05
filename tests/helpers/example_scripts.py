# SPDX-License-Identifier: Apache-2.0
"""Scripts of `examples/offline_inference`: `run_example` as a user types it, `load_example` as a
module.
"""

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
    """Run it to its end; status: how it must end.

    It must have stopped its engine. Of one left to the interpreter's exit vLLM ends the process
    before the client, and often warns the user that the engine ended by itself.
    """
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}  # a user's default
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds(400), check=False, env=environ
    )
    shown = result.stdout[-4000:] + result.stderr[-4000:]
    assert result.returncode == status, f"{name} ended with status {result.returncode}:\n{shown}"
    ending = [line for line in result.stdout.splitlines() if "[shutdown]" in line]
    assert ending and "MPClient: start" in ending[0], f"{name} left its engine running:\n{shown}"
    return result


def load_example(name: str) -> ModuleType:
    """Its functions, without running it."""
    return load_script(EXAMPLES / name)
