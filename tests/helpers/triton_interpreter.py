# SPDX-License-Identifier: Apache-2.0
"""Run Triton kernels on a CPU, by Triton's interpreter.

It needs a process of its own: Triton decides when it is imported how kernels are compiled.
"""

import os
import platform
import subprocess
import sys
from importlib.util import find_spec

import pytest


def require_triton() -> None:
    """Fail where Triton can be had and is missing: without it nothing holds the kernels. Elsewhere, skip."""
    if find_spec("triton") is not None:
        return
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        pytest.fail("Triton is missing, so no kernel was run: `make setup` installs it, or pip install -e '.[cpu,dev]'")
    pytest.skip("the extra [cpu] has no Triton for this machine")


def interpret(*arguments: str) -> str:
    """What `python ARGUMENTS` prints where Triton's interpreter runs the kernels. Fails with its errors."""
    require_triton()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
