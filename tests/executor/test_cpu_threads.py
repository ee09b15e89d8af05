# SPDX-License-Identifier: Apache-2.0
"""Where a pipeline is computed on a CPU: with all of torch's threads, and with one where the
engine runs.
"""

import threading
from collections.abc import Iterator

import pytest
import torch

from vllm_omni.executor.cpu_threads import CpuThreads
from vllm_omni.executor.worker_thread import WorkerThread


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_lanes_compute_with_all_threads_and_their_owner_with_one(threads: int) -> None:
    owned = CpuThreads(torch.device("cpu"))
    seen: list[tuple[str, int]] = []
    lanes = [WorkerThread[None](name, owned.set_threads) for name in ("a", "b")]
    for thread in lanes:
        thread.start_work(
            lambda pause: seen.append((threading.current_thread().name, torch.get_num_threads()))
        )
        assert thread.advance() == (True, None)
        assert torch.get_num_threads() == 1, "a lane's choice is its own"
        thread.close()
    assert seen == [("a", threads), ("b", threads)]
    owned.set_threads()
    assert torch.get_num_threads() == threads


def test_a_gpu_s_host_is_left_alone(threads: int) -> None:
    owned = CpuThreads(torch.device("cuda", 0))
    assert torch.get_num_threads() == threads
    owned.set_threads()
    owned.set_threads()
    assert torch.get_num_threads() == threads
