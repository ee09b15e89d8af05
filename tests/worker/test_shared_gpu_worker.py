# SPDX-License-Identifier: Apache-2.0
"""Ranks that share GPUs: their devices and their NCCL environment variables."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.worker.diffusion import shared_gpu_worker
from vllm_omni.worker.diffusion.shared_gpu_worker import SharedGPUWorker


def test_ranks_are_spread_over_the_available_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are spread over the available GPUs, and each rank appears to NCCL as a separate host.

    Devices and environment variables are set before the stock worker starts NCCL. Ranks on the same
    GPU divide its session memory equally.
    """
    before = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NCCL_", "VLLM_ALLREDUCE_"))
    }
    monkeypatch.setattr(shared_gpu_worker.os, "environ", dict(before))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    positions = []

    def stock(worker: Any) -> None:
        assert worker.parallel_config.disable_custom_all_reduce
        assert {name: value for name, value in os.environ.items() if before.get(name) != value} == {
            "NCCL_HOSTID": f"rank{worker.rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        }
        assert before.items() <= os.environ.items()
        positions.append((worker.local_rank, os.environ["NCCL_HOSTID"]))

    monkeypatch.setattr(shared_gpu_worker.DiffusionGPUWorker, "init_device", stock)
    monkeypatch.setattr(
        shared_gpu_worker.DiffusionGPUWorker, "compile_or_warm_up_model", lambda worker: "times"
    )
    for rank in range(4):
        worker: Any = object.__new__(SharedGPUWorker)
        worker.rank = worker.local_rank = rank
        worker.parallel_config = SimpleNamespace(world_size=4, data_parallel_size=1)
        worker.init_device()
        worker.model_runner = SimpleNamespace(sessions=SimpleNamespace(max_bytes=1001))
        assert worker.compile_or_warm_up_model() == "times"
        bound = worker.model_runner.sessions.max_bytes
        assert (bound, type(bound)) == (500, int)
    assert positions == [(0, "rank0"), (1, "rank1"), (0, "rank2"), (1, "rank3")]


def test_nothing_changes_with_enough_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are enough GPUs, the worker connects ranks in the same way as the stock worker."""
    monkeypatch.setattr(shared_gpu_worker.os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(shared_gpu_worker.DiffusionGPUWorker, "init_device", lambda worker: None)
    worker: Any = object.__new__(SharedGPUWorker)
    worker.rank = worker.local_rank = 1
    worker.parallel_config = SimpleNamespace(
        world_size=2, data_parallel_size=1, disable_custom_all_reduce=False
    )
    worker.init_device()
    assert worker.local_rank == 1 and not worker.parallel_config.disable_custom_all_reduce
    assert "NCCL_HOSTID" not in os.environ


def test_several_engines_are_refused() -> None:
    worker: Any = object.__new__(SharedGPUWorker)
    worker.parallel_config = SimpleNamespace(data_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"^SharedGPUWorker supports one engine only: remove --data-parallel-size$"
    ):
        worker.init_device()
