# SPDX-License-Identifier: Apache-2.0
"""One of two ranks raises in work that the other takes part in: clients are told, and every
process ends.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from faulty_worker import fault
from helpers.engine_client import running_engine
from test_dead_stage import LIMIT_S, workers
from vllm.v1.engine.exceptions import EngineDeadError

pytestmark = pytest.mark.nightly
PP2, TP2 = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "parallel", "omni", "rank", "method"),
    [
        pytest.param(
            "null_world", PP2, {}, 0, "denoise_step", id="first stage, which answers nobody"
        ),
        pytest.param("null_world", PP2, {}, 1, "denoise_step", id="last stage, which answers"),
        pytest.param(
            "causal_wan",
            TP2,
            {},
            1,
            "denoise_step",
            id="tensor-parallel rank, which answers nobody",
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
    """While another client's chunk is computed."""
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
            print(f"clients were told after {time.monotonic() - start:.1f} s")
            assert isinstance(results[1], EngineDeadError), results
            assert not slow or isinstance(results[0], EngineDeadError), results
            _, alive = psutil.wait_procs(
                processes, timeout=max(0.1, LIMIT_S - (time.monotonic() - start))
            )
            assert not alive

    asyncio.run(scenario())
