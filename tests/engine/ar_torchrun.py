# SPDX-License-Identifier: Apache-2.0
"""A language model under torchrun: two ranks, each an engine of its own, run a script that checks
its own rows.

A script says `step(...)` after each of its parts, so that one that is cut off has told how far each
rank came, and `rows_are_right()` at its end.
"""

import os
import sys
import time
from pathlib import Path

from helpers.programs import run_program

RIGHT = "ROWS RIGHT"
_Started_S = time.monotonic()


def run_two_ranks(
    script: str, folder: Path, arguments: list[str], limit_s: float, **environment: str
) -> None:
    """Run `script` with `arguments` on two ranks, which import what is in this folder; all must
    end in `limit_s`.
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
    """In a rank: how long it has taken to get here, since the script imported this module."""
    print(
        f"rank {os.environ['RANK']}: {done} after {time.monotonic() - _Started_S:.0f} s", flush=True
    )


def rows_are_right() -> None:
    step(RIGHT)
