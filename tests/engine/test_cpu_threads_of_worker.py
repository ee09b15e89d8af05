# SPDX-License-Identifier: Apache-2.0
"""On a CPU the only rank computes with every core, in the engine's own process, unless the user
says otherwise.

Where the user says nothing, the engine's process is spawned as vLLM does, so that OpenMP's own
default is what a user would meet; the others are forked and inherit one thread. What OpenMP makes
of a user's OMP_NUM_THREADS is looked at in a served engine
(tests/entrypoints/realtime/test_live_served.py).
"""

import asyncio
import os
from multiprocessing import popen_spawn_posix
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest
import torch
from helpers.engine_client import running_engine
from vllm.engine.arg_utils import AsyncEngineArgs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU workers only")


@pytest.mark.parametrize(
    ("environment", "spawned", "threads", "below_engine"),
    [
        ({}, True, min(psutil.cpu_count(logical=False), len(os.sched_getaffinity(0))), False),
        ({"OMP_NUM_THREADS": "1"}, False, 1, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0"}, False, 1, True),
    ],
    ids=["all cores", "OMP_NUM_THREADS", "vLLM's own binding"],
)
def test_threads_of_the_only_rank(
    null_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    spawned: bool,
    threads: int,
    below_engine: bool,
) -> None:
    """Stock vLLM takes a process more and leaves it a core less.

    Needs as many cores as the machine has.
    """
    if spawned:
        monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(popen_spawn_posix.Popen))
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def scenario() -> None:
        async with running_engine(null_world) as client:
            (seen,) = await client.engine.collective_rpc("cpu_threads")
            title = " ".join(psutil.Process(seen["pid"]).cmdline())
            assert (seen["threads"], "EngineCore" not in title) == (threads, below_engine), title

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["unset", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"],
)
def test_threads_sleep_soon_when_they_wait(
    null_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    """Set once the engine is configured, before its process starts; libgomp reads it while it is
    loaded.
    """
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    AsyncEngineArgs(
        model=str(null_world), config_format="omni", skip_tokenizer_init=True
    ).create_engine_config()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
