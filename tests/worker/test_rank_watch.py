# SPDX-License-Identifier: Apache-2.0
"""The effect of one rank's failure on the other ranks, with real processes (gloo)."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from helpers.ports import port_for_a_server
from helpers.rank_processes import rank_context
from helpers.waits import seconds, wait_until

from vllm_omni.runtime.exit_codes import ENGINE_DIED


def work(rank: int, size: int, heard: bool, address: str, output: Path, stop: Event) -> None:
    """Run one rank. The last rank fails while the other ranks wait for it in a collective."""
    import torch
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    from vllm_omni.worker.diffusion.liveness import failing_together

    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    ranks = [list(range(size))]
    parallel_state._WORLD = parallel_state.GroupCoordinator(
        ranks, rank, "gloo", use_device_communicator=False
    )
    dist.barrier()
    try:
        with failing_together(heard=heard):
            if rank == size - 1:
                raise ValueError("injected failure")
            dist.all_reduce(torch.ones(1))
    except Exception as error:
        print("raised", type(error).__name__, flush=True)
        stop.wait()  # wait like a worker that waits for its next call


class Ranks:
    """Rank processes, one for each value of `heard`.

    Setting the `stop` event ends the processes that wait for their next call.
    """

    def __init__(self, folder: Path, *heard: bool) -> None:
        address = f"tcp://127.0.0.1:{port_for_a_server()}"
        context = rank_context()
        self.stop = context.Event()
        self._outputs = [folder / f"rank{rank}" for rank in range(len(heard))]
        self.processes: list[BaseProcess] = [
            context.Process(
                target=work, args=(rank, len(heard), hears, address, self._outputs[rank], self.stop)
            )
            for rank, hears in enumerate(heard)
        ]
        for process in self.processes:
            process.start()

    def join(self, rank: int, timeout_s: float) -> str:
        """Wait until a rank exits and return its output."""
        self.processes[rank].join(timeout_s)
        return self._outputs[rank].read_text()

    def wait_for(self, rank: int, text: str, timeout_s: float) -> None:
        output = self._outputs[rank]
        wait_until(
            lambda: output.exists() and text in output.read_text(),
            timeout_s,
            lambda: f"no {text!r} of {rank}",
        )


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Ranks]]:
    """A list to which tests append the ranks that they start, so the fixture can stop them."""
    running: list[Ranks] = []
    yield running
    for ranks in running:
        for process in ranks.processes:
            process.kill()
            process.join()


def test_a_failed_rank_exits_and_wakes_the_waiting_rank(
    started: list[Ranks], tmp_path: Path
) -> None:
    """A rank that fails logs its traceback and exits.

    The rank that returns results raises an error immediately rather than continuing to wait in its
    collective.
    """
    started.append(ranks := Ranks(tmp_path, True, False))
    output = ranks.join(1, timeout_s=60)
    ended_s = time.monotonic()
    assert ranks.processes[1].exitcode == ENGINE_DIED
    assert "rank 1 exits" in output
    assert "ValueError: injected failure" in output
    assert "raised" not in output
    ranks.wait_for(0, "raised", timeout_s=30)
    assert time.monotonic() - ended_s < seconds(5)
    ranks.stop.set()
    assert "exits, so that" not in ranks.join(0, timeout_s=30)
    assert ranks.processes[0].exitcode == 0


def test_an_exception_on_a_single_rank_is_raised(started: list[Ranks], tmp_path: Path) -> None:
    """If the engine has only one rank, an exception is raised and does not end the process."""
    started.append(rank := Ranks(tmp_path, False))
    rank.wait_for(0, "raised ValueError", timeout_s=60)
    assert rank.processes[0].is_alive()
    rank.stop.set()
    rank.join(0, timeout_s=30)
    assert rank.processes[0].exitcode == 0
