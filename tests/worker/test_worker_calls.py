# SPDX-License-Identifier: Apache-2.0
"""`DiffusionWorkerMixin` on a mock of the stock worker, with a runner in the same process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.logged import logged
from helpers.scheduling import execute, new_request, step
from helpers.snapshot_steps import Worker, text_chunk

from vllm_omni.model_executor.layers import fast_path
from vllm_omni.model_executor.layers.fast_path import FastPath
from vllm_omni.worker.diffusion import worker as diffusion_worker
from vllm_omni.worker.diffusion.worker import DiffusionWorkerMixin


class Stock:
    """A mock of vLLM's worker that records the calls it receives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.use_v2_model_runner = True
        self.calls: list[Any] = [(args, kwargs)]

    def execute_model(self, scheduler_output: Any) -> Any:
        self.calls.append(scheduler_output)
        return "output"

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((args, kwargs))


class Mixed(DiffusionWorkerMixin, Stock):  # type: ignore[misc]
    pass


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(diffusion_worker, "end_with_parent", lambda: None)
    mixed: Any = Mixed("config", rank=3)
    mixed.device = torch.device("cpu")
    return mixed


def test_the_worker_disables_the_v2_model_runner(worker: Any) -> None:
    """The worker disables vLLM's V2 model runner, because the diffusion runner is neither of vLLM's
    own model runners (V1 and V2).
    """
    assert worker.calls == [(("config",), {"rank": 3})]
    assert worker.use_v2_model_runner is False


def test_the_worker_creates_the_diffusion_runner(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffusion_worker, "DiffusionGPUModelRunner", lambda *args: args)
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(architecture="LancePipeline"))
    assert worker._make_model_runner() == (worker.vllm_config, worker.device)
    worker.vllm_config.model_config.architecture = "Qwen2ForCausalLM"
    with pytest.raises(
        ValueError, match="runs diffusion models; for a language model drop the flag"
    ):
        worker._make_model_runner()


def test_a_busy_session_is_not_closed_by_a_call(
    worker: Any, make_runner: Any, null_world: Path
) -> None:
    runner = worker.model_runner = make_runner(null_world)
    text_chunk(Worker(runner), "idle", 0)
    execute(runner, step(new=[new_request("r", session_id="busy", prompt="a field")]))
    closed = [worker.close_session(session_id) for session_id in ("idle", "busy", "absent")]
    assert closed == [True, False, False]
    assert "busy" in runner.sessions and "idle" not in runner.sessions


def test_a_reload_invalidates_the_weights_digest(worker: Any) -> None:
    worker.model_runner = SimpleNamespace()
    evicted: list[bool] = []
    worker.snapshots.invalidate_weights = lambda: evicted.append(True)
    worker.reload_weights("iterator", weights_path="there")
    assert worker.calls[1:] == [(("iterator",), {"weights_path": "there"})]
    assert evicted == [True]


@pytest.mark.parametrize("responses", [False, True])
def test_a_rank_reports_whether_its_exceptions_reach_the_engine(
    worker: Any, monkeypatch: pytest.MonkeyPatch, responses: bool
) -> None:
    """The worker tells `failing_together` whether exceptions on this rank reach the engine.

    Only exceptions on the rank that returns results do so. A rank starts receiving results after
    the step.
    """
    heard: list[bool] = []

    @contextlib.contextmanager
    def failing_together(**how: bool) -> Iterator[None]:
        heard.append(how["heard"])
        yield

    monkeypatch.setattr(
        diffusion_worker, "get_world_group", lambda: SimpleNamespace(rank=0, world_size=2)
    )
    monkeypatch.setattr(diffusion_worker, "runs_steps", lambda: responses)
    monkeypatch.setattr(diffusion_worker, "failing_together", failing_together)
    worker.model_runner = SimpleNamespace(
        role=SimpleNamespace(listen=lambda: worker.calls.append("listens"))
    )
    assert worker.execute_model("step") == "output"
    assert worker.calls[1:] == ["step", "listens"]
    assert heard == [responses]


@pytest.mark.parametrize(
    ("ranks", "timeout_s", "watched"), [(1, 5.0, []), (2, None, []), (2, 5.0, [5.0, "stopped"])]
)
def test_ranks_watch_each_other_from_the_warm_up_to_the_shutdown(
    worker: Any,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    timeout_s: float | None,
    watched: list[Any],
) -> None:
    """Ranks watch each other from the warm-up to the shutdown.

    A single rank has no watchdog. If there are several ranks, setting `rank_timeout_s` to None
    disables the watchdog.
    """
    seen: list[Any] = []
    used: list[int] = []

    def watch_other_ranks(seconds: float) -> Any:
        seen.append(seconds)
        return SimpleNamespace(stop=lambda: seen.append("stopped"))

    monkeypatch.setattr(diffusion_worker, "watch_other_ranks", watch_other_ranks)
    monkeypatch.setattr(
        diffusion_worker, "get_world_group", lambda: SimpleNamespace(rank=0, world_size=ranks)
    )
    monkeypatch.setattr(
        diffusion_worker, "warm_up", lambda runner, before: used.append(before) or 1.5
    )
    monkeypatch.setattr(diffusion_worker, "freeze_gc_heap", lambda: None)
    worker._paths_of_all_ranks = list
    omni = SimpleNamespace(rank_timeout_s=timeout_s, suspend_dir=None)
    worker.model_runner = SimpleNamespace(omni=omni)
    assert worker.compile_or_warm_up_model().language_model == 1.5
    assert used == [0]
    worker.shutdown()
    assert seen == watched
    assert worker.calls[1:] == ["shutdown"]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_the_paths_of_all_and_the_first_logs_them(
    worker: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A fast path that is unavailable on one rank is off on every rank. The first rank logs all
    fast paths.
    """
    on, off = FastPath("a", "slow"), FastPath("a", "slow", "it is missing")
    world = SimpleNamespace(rank=rank, world_size=2, cpu_group="gloo")
    worker.vllm_config, worker.model_runner = None, SimpleNamespace(network=None)

    def gather(found: list[Any], own: Any, group: str) -> None:
        assert own == [on]
        found[:] = [own, [off]]

    monkeypatch.setattr(diffusion_worker, "get_world_group", lambda: world)
    monkeypatch.setattr(diffusion_worker, "engine_paths", lambda *args: [on])
    monkeypatch.setattr(diffusion_worker.dist, "all_gather_object", gather)
    with logged(fast_path.logger) as lines:
        assert worker._paths_of_all_ranks() == [off]
    assert lines == (["fast paths: none", f"fast path {off}"] if rank == 0 else [])


def test_device_memory_is_reported_on_a_gpu(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU worker reports its device memory. A CPU worker reports none."""
    assert worker.device_memory() == {}
    worker.device = torch.device("cuda", 1)
    responses = {
        "mem_get_info": (60, 100),
        "memory_allocated": 10,
        "memory_reserved": 20,
        "max_memory_allocated": 30,
    }
    for name, response in responses.items():
        found = {worker.device: response}
        monkeypatch.setattr(torch.cuda, name, found.__getitem__)
    expected = {
        "used": 40,
        "total": 100,
        "torch_allocated": 10,
        "torch_reserved": 20,
        "torch_peak": 30,
    }
    assert worker.device_memory() == expected
