# SPDX-License-Identifier: Apache-2.0
"""On a CPU, a single rank runs in the engine's process and uses every core, unless the user sets
the number of threads.

By default, vLLM spawns the engine's process, so OpenMP's default applies. A forked process would
inherit the tests' setting of one thread. tests/entrypoints/cli/test_plain_serve.py covers
OMP_NUM_THREADS in a served engine.
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
        ({"VLLM_CPU_OMP_THREADS_BIND": "0"}, False, 1, True),
    ],
    ids=["all cores", "binding by vLLM"],
)
def test_threads_of_a_single_rank(
    null_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    spawned: bool,
    threads: int,
    below_engine: bool,
) -> None:
    """A single rank uses all available cores. By default, vLLM would start an additional process
    and use one core fewer.
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
def test_waiting_threads_sleep_early(
    null_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    """`GOMP_SPINCOUNT` is set so that waiting OpenMP threads soon go to sleep, unless the user sets
    a wait policy.

    The engine's configuration sets the variable before its process starts, because libgomp reads it
    when it is loaded.
    """
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    AsyncEngineArgs(
        model=str(null_world), config_format="omni", skip_tokenizer_init=True
    ).create_engine_config()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
