# SPDX-License-Identifier: Apache-2.0
"""On a CPU the only rank computes with every core, in the engine's own process, unless the user says otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU workers only")

SCRIPT = """
import json, os, sys
import psutil
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], config_format="omni", skip_tokenizer_init=True, enforce_eager=True,
        additional_config={"omni": {"height": 32, "width": 48}},
    )
    (seen,) = llm.collective_rpc("cpu_threads")
    parent = psutil.Process(seen["pid"]).ppid()
    print("SEEN", json.dumps({**seen, "below_engine": parent != os.getpid()}))
"""


def threads_of_worker(model: Path, script: Path, **environment: str) -> dict[str, int]:
    script.write_text(SCRIPT)
    named = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")
    plain = {name: value for name, value in os.environ.items() if name not in named}
    command = [sys.executable, str(script), str(model)]
    environment = {**plain, "VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    seen = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert seen, done.stderr[-3000:]
    result: dict[str, int] = json.loads(seen[0].removeprefix("SEEN "))
    return result


@pytest.mark.parametrize(
    ("environment", "threads", "below_engine"),
    [
        ({}, min(psutil.cpu_count(logical=False), len(os.sched_getaffinity(0))), False),
        ({"OMP_NUM_THREADS": "1"}, 1, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0"}, 1, True),
    ],
    ids=["all cores", "OMP_NUM_THREADS", "vLLM's own binding"],
)
def test_threads_of_the_only_rank(
    null_world: Path, tmp_path: Path, environment: dict[str, str], threads: int, below_engine: bool
) -> None:
    """Stock vLLM takes a process more and leaves it a core less. Needs as many cores as the machine has."""
    seen = threads_of_worker(null_world, tmp_path / "offline.py", **environment)
    assert (seen["threads"], seen["below_engine"]) == (threads, below_engine)
