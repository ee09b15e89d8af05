# SPDX-License-Identifier: Apache-2.0
"""What a failure of one rank's work does: ranks as real processes (gloo), of which one raises."""

import socket
import subprocess
import sys
import time

from vllm_omni.worker.watchdog import EXIT_CODE

_RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm_omni.worker.rank_watch import failing_together

rank, heard, address, size = int(sys.argv[1]), sys.argv[2] == "heard", sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=60))
ranks = [list(range(size))]
parallel_state._WORLD = parallel_state.GroupCoordinator(ranks, rank, "gloo", use_device_communicator=False)
dist.barrier()
try:
    with failing_together(heard=heard):
        if rank == size - 1:
            raise ValueError("injected failure")
        dist.all_reduce(torch.ones(1))
except Exception as error:
    print("raised", type(error).__name__, flush=True)
    sys.stdin.readline()  # as a worker that waits for its next call
"""


def start(*heard: bool) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), "heard" if hears else "unheard", address, str(len(heard))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, hears in enumerate(heard)
    ]


def test_a_rank_that_nobody_hears_ends_itself_and_wakes_the_one_that_waits() -> None:
    """With its traceback; the other, whose answer counts, raises at once instead of waiting for its collective."""
    ranks = start(True, False)
    try:
        output, _ = ranks[1].communicate(timeout=60)
        ended_s = time.monotonic()
        assert ranks[1].returncode == EXIT_CODE
        assert "rank 1 ends itself" in output
        assert "ValueError: injected failure" in output
        assert "raised" not in output
        answer, _ = ranks[0].communicate("\n", timeout=30)
        assert "raised" in answer
        assert "ends itself" not in answer
        assert ranks[0].returncode == 0
        assert time.monotonic() - ended_s < 5
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_one_rank_raises_as_ever() -> None:
    """On an engine's only rank an exception costs no process."""
    (rank,) = start(False)
    try:
        output, _ = rank.communicate("\n", timeout=60)
        assert "raised ValueError" in output
        assert rank.returncode == 0
    finally:
        rank.kill()
        rank.wait()
