# SPDX-License-Identifier: Apache-2.0
"""The way back between stages: answers arrive in order, and nobody waits on a device before it
has sent.
"""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ports import port_for_a_server
from helpers.rank_processes import run_ranks
from vllm.engine.arg_utils import EngineArgs

from vllm_omni.worker.diffusion import warm_up
from vllm_omni.worker.diffusion import worker as diffusion_worker
from vllm_omni.worker.diffusion.gpu_worker import DiffusionGPUWorker
from vllm_omni.worker.diffusion.link import ReturnChannel, connect_forward
from vllm_omni.worker.diffusion.worker import DiffusionWorkerMixin

STAGES, STEPS = 3, 2


class Model:
    def latents(self, request: Any) -> torch.Tensor:
        return torch.full((2, 3), 10.0 * request.number + request.step)


def requests(step: int) -> list[Any]:
    return [
        SimpleNamespace(request_id=f"r{n}", number=n, step=step, num_steps=STEPS) for n in range(2)
    ]


def stage(rank: int, address: str) -> None:
    """Two batches of two requests go through; the last stage fails the second request's last
    step.
    """
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=STAGES)
    pp: Any = SimpleNamespace(
        is_first_rank=rank == 0,
        is_last_rank=rank == STAGES - 1,
        prev_rank=rank - 1,
        next_rank=rank + 1,
        device_group=dist.new_group(backend="gloo"),
    )
    connect_forward(pp, torch.device("cpu"))
    channel, model = ReturnChannel(range(STAGES), torch.device("cpu")), Model()
    if channel.is_last:
        for step in range(1, STEPS + 1):
            batch = requests(step)
            ok = [True, step < STEPS]
            channel.send(batch, ok, [model.latents(request) for request in batch])
        dist.barrier()
        return
    irecv, posted = dist.irecv, []
    dist.irecv = lambda *args, **kwargs: posted.append(1) or irecv(*args, **kwargs)
    taken = []
    for step in range(1, STEPS + 1):
        channel.expect(requests(step))
        assert len(posted) == step - 1, "a receive was posted before the hidden states were sent"
        channel.listen(model)  # type: ignore[arg-type]
        assert len(posted) == step
    channel.drain(["somebody else"], lambda *_: pytest.fail("nobody asked"))
    channel.drain(
        ["r1"], lambda request, ok, latents: taken.append((request, ok, latents.tolist()))
    )
    for (request, ok, latents), (step, number) in zip(
        taken, [(1, 0), (1, 1), (2, 0), (2, 1)], strict=True
    ):
        assert (request.number, request.step, ok) == (number, step, (number, step) != (1, STEPS))
        assert latents == [10.0 * number + step] * 6
    dist.barrier()


def test_responses_arrive_in_the_order_of_batches() -> None:
    address = f"tcp://127.0.0.1:{port_for_a_server()}"
    run_ranks(stage, (address,), STAGES)


COLUMNS = ((0, 2), (1, 3))
"""Two stages of two ranks each: a rank's answers come from its counterpart."""
VAE = 4
"""A rank behind them that only decodes takes part in the construction, no further."""


class Growing:
    """The n-th batch's latents: n + 1 elements of its first request and 2 of its second, in
    bf16.
    """

    def latents(self, request: Any) -> torch.Tensor:
        shape = (request.batch + 1, 1) if request.request_id.startswith("first") else (1, 2)
        return torch.full(shape, request.value, dtype=torch.bfloat16)


def batch_of(number: int, value: float) -> list[Any]:
    return [
        SimpleNamespace(
            request_id=f"{name} {number}", batch=number, value=value + index, step=1, num_steps=1
        )
        for index, name in enumerate(("first", "second"))
    ]


def rank_of_a_column(rank: int, address: str) -> None:
    """Three batches.

    Answers are applied up to the newest that was asked for; the others wait, in order.
    """
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=5)
    column = COLUMNS[rank % 2]
    channel, model = ReturnChannel(column, torch.device("cpu")), Growing()
    assert channel.is_last == (rank in (2, 3))
    batches = [batch_of(number, 10.0 * number + 100 * column[1]) for number in range(3)]
    if channel.is_last:
        for batch in batches:
            channel.send(
                batch, [True, batch[0].batch != 1], [model.latents(request) for request in batch]
            )
    elif rank != VAE:
        taken: list[Any] = []
        for batch in batches:
            channel.expect(batch)
            channel.listen(model)  # type: ignore[arg-type]
        for requested, number_taken in (
            ([], 0),
            (["second 1", "somebody else"], 4),
            (["first 0"], 4),
            (["first 2"], 6),
        ):
            channel.drain(
                requested, lambda request, ok, latents: taken.append((request, ok, latents))
            )
            assert len(taken) == number_taken
        assert [(request.request_id, ok, latents.tolist()) for request, ok, latents in taken] == [
            (
                request.request_id,
                request.request_id != "second 1",
                model.latents(request).flatten().tolist(),
            )
            for batch in batches
            for request in batch
        ]
        assert all(latents.dtype == torch.float32 for _, _, latents in taken)
    dist.barrier()


def test_responses_come_from_the_counterpart_on_the_last_stage() -> None:
    address = f"tcp://127.0.0.1:{port_for_a_server()}"
    run_ranks(rank_of_a_column, (address,), 5)


class Events(list[str]):
    """What a rank does, in order."""

    def runner(self) -> Any:
        hidden = SimpleNamespace(tensors={})
        return SimpleNamespace(
            pp=SimpleNamespace(
                is_first_rank=True, send_tensor_dict=lambda *_, **__: self.append("sent")
            ),
            tp=None,
            role=SimpleNamespace(
                receive_results=lambda ids: None,
                micro_step=lambda *_: self.append("forward") or hidden,
                listen=lambda: self.append("listens"),
            ),
        )


def test_a_worker_listens_for_responses_once_it_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive that waits on the device may hold up whatever was issued after it, on any
    stream.
    """
    events = Events()

    class Stock:
        def execute_model(self, scheduler_output: Any) -> None:
            events.append("sent")

    class Worker(DiffusionWorkerMixin, Stock):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model_runner = events.runner()

    monkeypatch.setattr(diffusion_worker, "get_world_group", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(diffusion_worker, "runs_steps", lambda: True)
    monkeypatch.setattr(
        diffusion_worker, "failing_together", lambda heard: contextlib.nullcontext()
    )
    Worker().execute_model(None)  # type: ignore[arg-type]
    assert events == ["sent", "listens"]


@pytest.mark.parametrize(
    ("stages", "requested", "granted"), [(1, None, None), (2, None, "32"), (2, "8", "8")]
)
def test_stages_request_for_hardware_queues(
    null_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    requested: str | None,
    granted: str | None,
) -> None:
    """Before CUDA is begun; whoever serves may ask for another number."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # the worker sets these too
    monkeypatch.setenv("CUDA_SCALE_LAUNCH_QUEUES", "")
    monkeypatch.delenv("CUDA_SCALE_LAUNCH_QUEUES")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", requested or "")
    if requested is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    args = EngineArgs(
        model=str(null_world),
        config_format="omni",
        skip_tokenizer_init=True,
        enforce_eager=True,
        pipeline_parallel_size=stages,
    )
    DiffusionGPUWorker(
        args.create_engine_config(), local_rank=0, rank=0, distributed_init_method=""
    )
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == granted
    assert os.environ.get("CUDA_SCALE_LAUNCH_QUEUES") == "4x"  # for any number of stages


def test_a_warm_up_listens_for_responses_once_it_has_sent() -> None:
    events = Events()
    warm_up._step(events.runner(), SimpleNamespace(request_id="r", failure=None))  # type: ignore[arg-type]
    assert events == ["forward", "sent", "listens"]
