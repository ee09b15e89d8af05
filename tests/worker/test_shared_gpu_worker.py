# SPDX-License-Identifier: Apache-2.0
"""Ranks that share GPUs: where each of them goes, and what NCCL is told."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.worker import shared_gpu_worker
from vllm_omni.worker.shared_gpu_worker import SharedGPUWorker


def test_ranks_are_spread_over_the_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the stock worker takes its device and starts NCCL; to which each rank is a host of its own."""
    monkeypatch.setattr(shared_gpu_worker.os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    places = []

    def stock(worker: Any) -> None:
        places.append((worker.local_rank, os.environ["NCCL_HOSTID"], worker.parallel_config.disable_custom_all_reduce))

    monkeypatch.setattr(shared_gpu_worker.DiffusionGPUWorker, "init_device", stock)
    for rank in range(4):
        worker: Any = object.__new__(SharedGPUWorker)
        worker.rank = worker.local_rank = rank
        worker.parallel_config = SimpleNamespace(disable_custom_all_reduce=False)
        worker.init_device()
    assert places == [(0, "rank0", True), (1, "rank1", True), (0, "rank2", True), (1, "rank3", True)]
