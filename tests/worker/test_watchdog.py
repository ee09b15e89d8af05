# SPDX-License-Identifier: Apache-2.0
"""Watchdogs in real processes: what happens when one rank is stopped or killed, when all ranks are
stopped, and when the engine shuts down.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from helpers.waits import pause, seconds

from vllm_omni.runtime.exit_codes import ENGINE_DIED

RANKS, TIMEOUT_S = 3, 2.0
_RANK = """
import socket, sys, time
from vllm_omni.runtime.processes import machine_id
from vllm_omni.worker.diffusion.liveness import PeerRank, Watchdog

rank, timeout_s = int(sys.argv[1]), float(sys.argv[2])
listen = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listen.bind(("127.0.0.1", 0))
import os
print(os.getpid(), listen.getsockname()[1], flush=True)
others = [line.split() for line in sys.stdin.readline().split(";")]
peers = [PeerRank(int(r), int(pid), machine_id(), ("127.0.0.1", int(port))) for r, pid, port in others if int(r) != rank]
dog = Watchdog(rank, listen, peers, machine_id(), b"token", timeout_s)
dog.start_watching()
print("watching", flush=True)
sys.stdin.readline()
dog.stop()
time.sleep(0.2 * rank)
"""  # noqa: E501


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(TIMEOUT_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    addresses = [
        f"{rank} {process.stdout.readline().strip()}" for rank, process in enumerate(processes)
    ]  # type: ignore[union-attr]
    for process in processes:
        process.stdin.write(";".join(addresses) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        assert process.stdout.readline() == "watching\n"  # type: ignore[union-attr]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_all_ranks_exit_when_one_is_stopped_or_killed(
    ranks: list[subprocess.Popen[str]], how: signal.Signals
) -> None:
    """If one rank is stopped or killed, all other ranks exit. A stopped rank is also killed."""
    pause(0.6)
    start = time.monotonic()
    ranks[1].send_signal(how)
    codes = [process.wait(timeout=TIMEOUT_S + seconds(5)) for process in ranks]
    assert codes == [ENGINE_DIED, -signal.SIGKILL, ENGINE_DIED]
    assert time.monotonic() - start < TIMEOUT_S + seconds(3)


@pytest.mark.nightly
def test_no_rank_exits_after_all_were_stopped(ranks: list[subprocess.Popen[str]]) -> None:
    """No rank exits after all ranks have been stopped for longer than the timeout, for example with
    Ctrl-Z.

    If the ranks shut down one after another, none of them exits with an error.
    """
    pause(1)
    for process in ranks:
        process.send_signal(signal.SIGSTOP)
    pause(TIMEOUT_S + 1)
    for process in ranks:
        process.send_signal(signal.SIGCONT)
    pause(TIMEOUT_S + 1)
    assert [process.poll() for process in ranks] == [None] * RANKS
    for process in ranks:
        os.write(process.stdin.fileno(), b"\n")  # type: ignore[union-attr]
    assert [process.wait(timeout=seconds(5)) for process in ranks] == [0] * RANKS
