# SPDX-License-Identifier: Apache-2.0
"""Run a language model under torchrun: two ranks with an engine each run a script that checks its
results.

The script calls `step(...)` after each check, so the output of a script that times out shows its
progress. The script calls `report_success()` at its end.
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
    """Run `script` on two ranks within `limit_s`. The script can import the modules of this
    folder.
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
    """Print `done` and the time since this module was imported. A rank's script calls this."""
    print(
        f"rank {os.environ['RANK']}: {done} after {time.monotonic() - _Started_S:.0f} s", flush=True
    )


def report_success() -> None:
    step(RIGHT)
