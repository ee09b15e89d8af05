# SPDX-License-Identifier: Apache-2.0
"""Run a language model under torchrun: each of two ranks has its own engine and runs a script that
checks the engine's results.

The script calls `step(...)` after each check, so the output shows how far a script got if it times
out. The script calls `report_success()` at its end.
"""

import os
import sys
import time
from pathlib import Path

from helpers.programs import run_program

RIGHT = "STATES RIGHT"
_Started_S = time.monotonic()


def run_two_ranks(
    script: str, folder: Path, arguments: list[str], limit_s: float, **environment: str
) -> None:
    """Run `script` on two ranks; it must finish within `limit_s`. The script can import the modules
    in this folder.
    """
    path = folder / "ranks.py"
    path.write_text(script)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(path),
    ]
    environment |= {"PYTHONPATH": str(Path(__file__).parent), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    output = run_program([*torchrun, *arguments], environment, limit_s)
    assert output.count(RIGHT) == 2, output[-4000:]


def step(done: str) -> None:
    """Print `done` and the time since this module was imported. Each rank's script calls this
    function.
    """
    print(
        f"rank {os.environ['RANK']}: {done} after {time.monotonic() - _Started_S:.0f} s", flush=True
    )


def report_success() -> None:
    step(RIGHT)
