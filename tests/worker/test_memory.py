# SPDX-License-Identifier: Apache-2.0
"""`MemoryBudget` on a mocked GPU that is shared with other processes."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.worker.diffusion import worker as diffusion_worker
from vllm_omni.worker.diffusion.gpu_worker import DiffusionGPUWorker
from vllm_omni.worker.diffusion.memory import MemoryBudget

GIB, MIB = 1 << 30, 1 << 20
TOTAL = 140 * GIB
SESSION = GIB
CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A mocked GPU. This process has 3 GiB of weights and a peak of 5 GiB, and torch has reserved 6
    GiB for it.

    `used` is the number of bytes used by all processes. `taken` holds the sizes requested from the
    allocator.
    """
    gpu = SimpleNamespace(used=0, taken=[])

    def empty(nbytes: int, **where: Any) -> None:
        assert where == {"dtype": torch.uint8, "device": CUDA}
        gpu.taken.append(nbytes)

    def mock(name: str, value: Any) -> None:
        def replacement(device: torch.device) -> Any:
            assert device == CUDA
            return value() if callable(value) else value

        monkeypatch.setattr(torch.cuda, name, replacement)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    mock("reset_peak_memory_stats", None)
    mock("synchronize", None)
    mock("mem_get_info", lambda: (TOTAL - gpu.used, TOTAL))
    mock("memory_reserved", 6 * GIB)
    mock("memory_allocated", 6 * GIB)
    mock("max_memory_allocated", 5 * GIB)
    mock("get_device_properties", SimpleNamespace(total_memory=TOTAL))
    return gpu


def session_bytes(device: SimpleNamespace, used_before: int) -> int:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(gpu_memory_utilization=0.1, kv_cache_memory_bytes=None)
    )
    budget = MemoryBudget(config, CUDA, used_before)
    with budget.measure():
        pass
    return budget.session_bytes(SESSION, None)


def test_memory_of_other_processes_does_not_reduce_sessions(device: SimpleNamespace) -> None:
    """A session budget of a tenth of the GPU's memory is the same whether the GPU is otherwise
    empty or shared with an engine that uses 92 GiB.
    """
    device.used = 6 * GIB + GIB
    alone = session_bytes(device, used_before=0)
    assert alone == int(TOTAL * 0.1) - (5 * GIB + GIB) + SESSION
    device.used += 92 * GIB
    assert session_bytes(device, used_before=92 * GIB) == alone


def test_memory_allocated_after_the_start_counts(device: SimpleNamespace) -> None:
    """Memory that this rank's libraries allocate outside torch after startup reduces the budget.

    Memory that other processes free does not increase the budget.
    """
    device.used = 6 * GIB + 92 * GIB
    without = session_bytes(device, used_before=92 * GIB)
    device.used += 2 * GIB
    assert session_bytes(device, used_before=92 * GIB) == without - 2 * GIB
    device.used -= 50 * GIB
    assert session_bytes(device, used_before=92 * GIB) == without


def test_memory_pools_of_cuda_graphs_count(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graph pools reduce the budget, because their unused memory is not available for
    sessions.
    """
    device.used = 6 * GIB
    without = session_bytes(device, used_before=0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    assert session_bytes(device, used_before=0) == without - 2 * GIB


def test_sessions_that_do_not_fit_are_an_error(device: SimpleNamespace) -> None:
    """If sessions do not fit in memory, the error names the option to raise."""
    device.used = 6 * GIB + 92 * GIB
    with pytest.raises(ValueError, match="raise --gpu-memory-utilization"):
        session_bytes(device, used_before=80 * GIB)


def test_a_worker_passes_the_initial_memory_use_to_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker passes vLLM's memory snapshot from before loading to the warm-up.

    After the warm-up, the heap is frozen, as in vLLM's workers, to avoid full garbage collections
    between requests.
    """
    worker: Any = object.__new__(DiffusionGPUWorker)
    worker.init_snapshot = SimpleNamespace(total_memory=TOTAL, free_memory=TOTAL - 93 * GIB)
    requested: list[int] = []
    omni = SimpleNamespace(rank_timeout_s=None, suspend_dir=None)
    worker.model_runner = SimpleNamespace(omni=omni)
    worker._paths_of_all_ranks = list
    monkeypatch.setattr(
        diffusion_worker, "warm_up", lambda runner, used: requested.append(used) or 0.0
    )
    monkeypatch.setattr(
        diffusion_worker, "get_world_group", lambda: SimpleNamespace(rank=0, world_size=1)
    )
    frozen_after: list[int] = []
    monkeypatch.setattr(
        diffusion_worker, "freeze_gc_heap", lambda: frozen_after.append(len(requested))
    )
    worker.compile_or_warm_up_model()
    assert requested == [93 * GIB] and frozen_after == [1]


def test_the_memory_of_the_warm_up_stays_reserved(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that the warm-up used stays reserved, so the first session does not wait for the
    driver.

    The measurement releases this memory to tell it apart from graph pools, then allocates it again.
    """
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    session_bytes(device, used_before=0)
    assert device.taken == [5 * GIB - 3 * GIB]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the allocator of a GPU")
def test_a_session_after_the_warm_up_reserves_no_memory() -> None:
    """A session started after the warm-up reuses the memory that the warm-up reserved."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(gpu_memory_utilization=0.5, kv_cache_memory_bytes=None)
    )
    where = torch.device("cuda", 0)
    torch.cuda.init()
    with MemoryBudget(config, where).measure():
        torch.empty(GIB, dtype=torch.uint8, device=where)
    reserved = torch.cuda.memory_reserved(where)
    session = [torch.empty(GIB // 8, dtype=torch.uint8, device=where) for _ in range(8)]
    assert torch.cuda.memory_reserved(where) == reserved >= GIB
    del session


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_cache_memory_bytes_is_the_budget(device: str) -> None:
    """As in vLLM, `--kv-cache-memory-bytes` sets the budget directly rather than as a share of the
    device memory.

    `omni.max_session_bytes` can lower the budget.
    """
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=8 * MIB, gpu_memory_utilization=0.9)
    )
    budget = MemoryBudget(config, torch.device(device))  # type: ignore[arg-type]
    assert budget.session_bytes(MIB, None) == 8 * MIB
    assert budget.session_bytes(MIB, 2 * MIB) == 2 * MIB
    assert budget.session_bytes(8 * MIB, None) == 8 * MIB
    config.cache_config.kv_cache_memory_bytes = 3 << 29
    reason = re.escape(
        "one session of the largest shape needs 2.00 GiB, but sessions may hold 1.50 GiB: lower "
        "omni.height/width or "
        "the window, raise --gpu-memory-utilization or omni.max_session_bytes"
    )
    with pytest.raises(ValueError, match=f"^{reason}$"):
        budget.session_bytes(2 * GIB, None)


def test_sessions_on_a_cpu_may_use_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, sessions may use half of the free memory. The budget is a whole number of bytes."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=12 * MIB + 1))
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    )
    found = MemoryBudget(config, torch.device("cpu")).session_bytes(MIB, None)
    assert (found, type(found)) == (6 * MIB, int)
