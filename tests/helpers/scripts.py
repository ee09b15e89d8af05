# SPDX-License-Identifier: Apache-2.0
"""Run a script in a new Python, or import it to test its functions."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from helpers.waits import seconds


def run_script(
    script: Path, *arguments: object, limit_s: float = 600
) -> "subprocess.CompletedProcess[str]":
    """Run a script and return its status and output.

    Raises:
        subprocess.TimeoutExpired: The script has not ended after `limit_s` seconds.
    """
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds(limit_s),
        check=False,
    )


def load_script(path: Path) -> ModuleType:
    """Return the script as a new module, whose `__name__` is not `__main__`."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module
