# SPDX-License-Identifier: Apache-2.0
"""What the CPU and GPU diffusion workers add to vLLM's workers.

The tests cover threads, environment variables and sessions in sleep mode. They need no GPU.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cpu_build import on_cpu
from helpers.logged import logged
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.diffusion import worker as diffusion_worker
from vllm_omni.worker.diffusion.gpu_worker import DiffusionGPUWorker

QUEUES = {"CUDA_SCALE_LAUNCH_QUEUES": "4x"}
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the environment variables that these tests check, and disable the watch on the parent
    process.
    """
    for name in ("OMP_NUM_THREADS", *QUEUES, *SEGMENTS, *CONNECTIONS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(diffusion_worker, "end_with_parent", lambda: None)


def settings() -> dict[str, str]:
    return {
        name: os.environ[name] for name in (*QUEUES, *SEGMENTS, *CONNECTIONS) if name in os.environ
    }


# CPU


@on_cpu
@pytest.mark.parametrize(
    ("positions", "quota", "cores"),
    [
        ([(0, 0), (0, 0), (0, 1), (1, 0)], 8, 3),
        ([(0, 0), (0, 1), (0, 2)], 2, 2),
        ([(0, 0), (0, 0)], 2, 1),
        ([], 1, 1),
    ],
)
def test_cores_are_counted_once_and_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, positions: list[tuple[int, int]], quota: int, cores: int
) -> None:
    """Each core is counted only once, and the count does not exceed the CPU quota.

    `positions` holds the NUMA node and the core of each hardware thread.
    """
    from vllm_omni.worker.diffusion import cpu_worker

    allowed = [SimpleNamespace(numa_node=node, physical_core=core) for node, core in positions]
    monkeypatch.setattr(cpu_worker, "get_allowed_cpu_list", lambda: allowed)
    monkeypatch.setattr(cpu_worker, "available_cpu_count", lambda: quota)
    assert cpu_worker.num_cores() == cores


@on_cpu
@pytest.mark.parametrize(("requested", "set_to"), [({}, [7]), ({"OMP_NUM_THREADS": "2"}, [])])
def test_a_cpu_worker_uses_all_cores_unless_omp_num_threads_is_set(
    monkeypatch: pytest.MonkeyPatch, requested: dict[str, str], set_to: list[int]
) -> None:
    """A CPU worker uses all cores unless OMP_NUM_THREADS is set. The number of threads is set
    before vLLM's worker makes it immutable.
    """
    from vllm_omni.worker.diffusion import cpu_worker

    for name, value in requested.items():
        monkeypatch.setenv(name, value)
    calls: list[Any] = []
    config: Any = SimpleNamespace(parallel_config="ranks")
    monkeypatch.setattr(cpu_worker, "share_memory_nodes", calls.append)
    monkeypatch.setattr(
        cpu_worker.CPUWorker, "__init__", lambda worker, *args, **named: calls.append((args, named))
    )
    monkeypatch.setattr(cpu_worker.CPUWorker, "init_device", lambda worker: calls.append("device"))
    monkeypatch.setattr(cpu_worker, "num_cores", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(
        cpu_worker.DiffusionCPUWorker, "_make_model_runner", lambda worker: "runner"
    )
    worker: Any = cpu_worker.DiffusionCPUWorker(config, 3, rank=4)
    with logged(cpu_worker.logger) as messages:
        worker.init_device()
    assert calls == ["ranks", ((config, 3), {"rank": 4}), *set_to, "device"]
    assert messages == [f"this rank uses {torch.get_num_threads()} CPU threads"]
    assert worker.model_runner == "runner"
    assert worker.cpu_threads() == {"threads": torch.get_num_threads(), "pid": os.getpid()}


# CUDA


def gpu_worker(
    monkeypatch: pytest.MonkeyPatch, *, stages: int = 1, sleep_mode: bool = False
) -> Any:
    def stock(worker: Any, *args: Any, **named: Any) -> None:
        assert (args, named) == (("config",), {"rank": 0})
        worker.parallel_config = SimpleNamespace(pipeline_parallel_size=stages)
        worker.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=sleep_mode)
        )
        worker.device = torch.device("cuda", 0)

    monkeypatch.setattr(Worker, "__init__", stock)
    worker: Any = DiffusionGPUWorker("config", rank=0)
    return worker


@pytest.mark.parametrize(
    ("stages", "sleep_mode", "made"),
    [
        (1, False, QUEUES | SEGMENTS),
        (1, True, QUEUES),
        (2, False, QUEUES | SEGMENTS | CONNECTIONS),
        (3, True, QUEUES | CONNECTIONS),
    ],
)
def test_cuda_environment_variables_are_set_before_cuda_starts(
    monkeypatch: pytest.MonkeyPatch, stages: int, sleep_mode: bool, made: dict[str, str]
) -> None:
    """CUDA environment variables are set before CUDA starts.

    Expandable segments are not enabled in sleep mode, which uses another allocator. Pipeline stages
    require more hardware queues.
    """
    gpu_worker(monkeypatch, stages=stages, sleep_mode=sleep_mode)
    assert settings() == made


def test_cuda_environment_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA environment variables that the user has set are left unchanged."""
    own = dict.fromkeys(QUEUES | SEGMENTS | CONNECTIONS, "own")
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    gpu_worker(monkeypatch, stages=2)
    assert settings() == own


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU worker. `calls` records the calls to the stock worker, to the sessions and to the
    device.
    """
    worker = gpu_worker(monkeypatch)
    worker.calls = []
    sessions = SimpleNamespace(
        to=lambda device: worker.calls.append(("to", device)),
        close_all=lambda: worker.calls.append("close"),
        trim_pool=lambda nbytes: worker.calls.append(("trim", nbytes)),
    )
    worker.model_runner = SimpleNamespace(sessions=sessions)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: worker.calls.append(("wait", device))
    )
    monkeypatch.setattr(
        Worker, "sleep", lambda worker, level: worker.calls.append(("sleep", level))
    )
    monkeypatch.setattr(Worker, "wake_up", lambda worker, tags: worker.calls.append(("wake", tags)))
    return worker


def test_sessions_move_to_the_host_in_sleep_mode(sleeper: Any) -> None:
    """In sleep mode, sessions move to the host once all work has finished and before device memory
    is freed.

    The sessions return to the device once the weights are back on it.
    """
    sleeper.sleep()
    assert sleeper.calls == [("wait", sleeper.device), ("to", "cpu"), ("sleep", 1)]
    for tags, back in (
        (None, True),
        (["weights"], True),
        (["kv_cache"], False),
        (["kv_cache", "weights"], True),
    ):
        sleeper.calls.clear()
        sleeper.wake_up(tags)
        assert sleeper.calls == [("wake", tags)] + [("to", sleeper.device)] * back


def test_sleep_level_2_closes_sessions(sleeper: Any) -> None:
    """Sleep level 2 discards the weights and closes all sessions."""
    sleeper.sleep(2)
    assert sleeper.calls == [("wait", sleeper.device), "close", ("trim", 0), ("sleep", 2)]
