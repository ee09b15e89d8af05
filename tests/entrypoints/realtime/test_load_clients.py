# SPDX-License-Identifier: Apache-2.0
"""The client process of benchmarks/realtime_load.py hands over its whole result."""

import array
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

from helpers.waits import wait_until

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PIPE_BYTES = 1 << 16
NUM_LATENCIES = 100_000

CHILD = f"""
import signal
from realtime_clients import report

signal.signal(signal.SIGUSR1, lambda number, frame: None)
report({{"latencies_ms": [0.25] * {NUM_LATENCIES}}})
"""


def test_a_signal_does_not_cut_the_result() -> None:
    """It exceeds the pipe, is written without a buffer, and the write is interrupted."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(BENCHMARKS)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, env=environ
    ) as child:
        assert child.stdout is not None
        pipe = child.stdout.fileno()
        waiting = array.array("i", [0])

        def is_full() -> bool:
            fcntl.ioctl(pipe, termios.FIONREAD, waiting)
            return waiting[0] > PIPE_BYTES - 4096

        wait_until(is_full)
        child.send_signal(signal.SIGUSR1)
        result = json.loads(child.stdout.read())
    assert len(result["latencies_ms"]) == NUM_LATENCIES
