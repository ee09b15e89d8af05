# SPDX-License-Identifier: Apache-2.0
"""`make test-cuda`: a process for each GPU, which sees no other one."""

from types import SimpleNamespace
from typing import Any

import cuda_workers
import pytest
import torch
from two_processes import unit_of


def requested(markexpr: str) -> Any:
    return SimpleNamespace(option=SimpleNamespace(markexpr=markexpr))


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, ["0", "1", "2"]), ("2,5,7", ["2", "5", "7"]), ("4,6", ["4", "6", "4"])],
)
def test_each_process_sees_one_gpu(
    visible: str | None, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that the caller may use; only where the CUDA tests were asked for."""
    specs = [SimpleNamespace(env={}) for _ in range(3)]
    monkeypatch.delenv(cuda_workers.VARIABLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(cuda_workers.VARIABLE, visible)
    cuda_workers.pytest_xdist_setupnodes(requested("not nightly"), specs)
    assert [spec.env for spec in specs] == [{}] * 3
    cuda_workers.pytest_xdist_setupnodes(requested("cuda and not several_gpus"), specs)
    assert [spec.env[cuda_workers.VARIABLE] for spec in specs] == gpus


def test_there_are_as_many_processes_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runs, and machines without a GPU, keep their number."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert cuda_workers.pytest_xdist_auto_num_workers(requested("cuda and not several_gpus")) == 4
    assert cuda_workers.pytest_xdist_auto_num_workers(requested("not nightly")) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cuda_workers.pytest_xdist_auto_num_workers(requested("cuda")) is None


def test_the_longest_cuda_file_is_split_by_its_engines() -> None:
    """Each generation of the runner has an engine of its own there, so they may run in different
    processes.
    """
    file = "tests/engine/test_ar_engine_cuda.py"
    units = [
        unit_of(f"{file}::{test}")
        for test in ("test_a[V1]", "test_b[V1]", "test_a[V2]", "test_c", "test_d[all]")
    ]
    assert units == [f"{file}[V1]", f"{file}[V1]", f"{file}[V2]", file, file]
