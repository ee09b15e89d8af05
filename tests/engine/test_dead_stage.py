# SPDX-License-Identifier: Apache-2.0
"""When a rank is killed, is stopped or raises an exception, clients receive an error, all processes
end, and a new engine can start.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from faulty_worker import fault
from helpers.engine_client import EngineClient, running_engine
from helpers.programs import has_ended
from helpers.waits import pause_task
from vllm.v1.engine.exceptions import EngineDeadError

pytestmark = pytest.mark.nightly
LIMIT_S = 10.0


def workers() -> list[psutil.Process]:
    """Return the worker processes of the engines that this process started, ordered by rank."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    alive = [child for child in children if not has_ended(child.pid)]
    return sorted(
        (child for child in alive if "Worker" in " ".join(child.cmdline())), key=lambda p: p.pid
    )


async def chunk(client: EngineClient) -> torch.Tensor:
    _, tensors = await client.send(
        session_id="s", chunk_index=0, prompt="a field", seed=1, output="latents"
    )
    return tensors["latents"].clone()


@pytest.mark.parametrize(
    ("how", "rank", "omni"),
    [
        pytest.param(signal.SIGKILL, 0, {}, id="first stage killed"),
        pytest.param(signal.SIGSTOP, 1, {}, id="last stage stopped"),
        pytest.param(
            signal.SIGSTOP, 0, {"vae_stage": True}, id="first stage stopped before a VAE stage"
        ),
    ],
)
def test_a_lost_rank_ends_the_engine_within_seconds(
    null_world: Path, how: signal.Signals, rank: int, omni: dict[str, Any]
) -> None:
    """When a rank is lost, the client of a running chunk and the client of a waiting chunk both
    receive an error within seconds.
    """

    async def scenario() -> None:
        async with running_engine(null_world, omni, pipeline_parallel_size=2) as client:
            before = await chunk(client)
            processes = workers()
            assert len(processes) == 2
            slow = {"step_ms": 50, "steps": 1000}
            pending = [
                asyncio.create_task(client.send(session_id=name, prompt="a field", options=slow))
                for name in "ab"
            ]
            await pause_task(1)
            assert not any(task.done() for task in pending)
            start = time.monotonic()
            processes[rank].send_signal(how)
            results = await asyncio.wait_for(
                asyncio.gather(*pending, return_exceptions=True), LIMIT_S
            )
            print(f"clients received the error after {time.monotonic() - start:.1f} s")
            assert all(isinstance(result, EngineDeadError) for result in results), results
            _, alive = psutil.wait_procs(
                processes, timeout=max(0.1, LIMIT_S - (time.monotonic() - start))
            )
            assert not alive
        async with running_engine(null_world, omni, pipeline_parallel_size=2) as client:
            assert torch.equal(await chunk(client), before)

    asyncio.run(scenario())


PP2, TP2 = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "parallel", "omni", "rank", "method"),
    [
        pytest.param(
            "null_world", PP2, {}, 0, "denoise_step", id="first stage, which returns no results"
        ),
        pytest.param(
            "null_world", PP2, {}, 1, "denoise_step", id="last stage, which returns results"
        ),
        pytest.param(
            "causal_wan",
            TP2,
            {},
            1,
            "denoise_step",
            id="tensor-parallel rank without results",
        ),
        pytest.param(
            "causal_wan", TP2, {"vae_parallel": True}, 1, "post_decode", id="shared decode"
        ),
    ],
)
def test_a_failed_rank_ends_the_engine_within_seconds(
    request: pytest.FixtureRequest,
    family: str,
    parallel: dict[str, Any],
    omni: dict[str, Any],
    rank: int,
    method: str,
) -> None:
    """When a rank raises an exception, the engine ends within seconds, even while another client's
    chunk is running.
    """
    model: Path = request.getfixturevalue(family)

    async def scenario() -> None:
        async with running_engine(
            model, omni, worker_cls="faulty_worker.FaultyWorker", **parallel
        ) as client:
            await client.send(session_id="fine", chunk_index=0, prompt="a field")
            processes = workers()
            assert len(processes) == 2
            start = time.monotonic()
            slow = {"options": {"step_ms": 20, "steps": 1000}} if family == "null_world" else {}
            pending = (
                client.send(session_id="fine", chunk_index=1, **slow),
                client.send(session_id="faulty", prompt=fault(rank, method)),
            )
            results = await asyncio.wait_for(
                asyncio.gather(*pending, return_exceptions=True), LIMIT_S
            )
            print(f"clients received the error after {time.monotonic() - start:.1f} s")
            assert isinstance(results[1], EngineDeadError), results
            assert not slow or isinstance(results[0], EngineDeadError), results
            _, alive = psutil.wait_procs(
                processes, timeout=max(0.1, LIMIT_S - (time.monotonic() - start))
            )
            assert not alive

    asyncio.run(scenario())
