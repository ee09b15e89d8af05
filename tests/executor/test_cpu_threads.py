# SPDX-License-Identifier: Apache-2.0
"""On a CPU, operations on a pipeline's worker thread use all of torch's threads, whereas operations
on the engine's thread use only one.
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


def test_worker_threads_use_all_cores_and_the_owning_thread_uses_one(threads: int) -> None:
    owned = CpuThreads(torch.device("cpu"))
    seen: list[tuple[str, int]] = []
    workers = [WorkerThread[None](name, owned.set_threads) for name in ("a", "b")]
    for thread in workers:
        thread.start_work(
            lambda pause: seen.append((threading.current_thread().name, torch.get_num_threads()))
        )
        assert thread.advance() == (True, None)
        assert torch.get_num_threads() == 1, "the number of threads is per thread"
        thread.close()
    assert seen == [("a", threads), ("b", threads)]
    owned.set_threads()
    assert torch.get_num_threads() == threads


def test_a_gpu_changes_no_threads(threads: int) -> None:
    owned = CpuThreads(torch.device("cuda", 0))
    assert torch.get_num_threads() == threads
    owned.set_threads()
    owned.set_threads()
    assert torch.get_num_threads() == threads
