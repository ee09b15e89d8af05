# SPDX-License-Identifier: Apache-2.0
"""Each benchmark's own command for a machine without a GPU, as its documentation writes it, runs
to a result.
"""

import ast
import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.engine_client import SharedEngine

from benchmarks.common import close_session

REPO = Path(__file__).parents[2]
_COMMAND = re.compile(r"^ +# .*without a GPU\n +python (benchmarks/.*)$", re.MULTILINE)


def commands() -> list[str]:
    documentation = (
        ast.get_docstring(ast.parse(path.read_text()))
        for path in (REPO / "benchmarks").glob("*.py")
    )
    return sorted(command for text in documentation for command in _COMMAND.findall(text or ""))


def test_the_large_benchmarks_have_one() -> None:
    found = {command.split()[0].removeprefix("benchmarks/") for command in commands()}
    assert {
        "lingbot_world.py",
        "matrix_game.py",
        "streaming_wan.py",
        "wan2_2.py",
        "lora.py",
        "lance.py",
    } <= found


@pytest.mark.nightly
@pytest.mark.parametrize("command", commands())
def test_it_runs(command: str, tmp_path: Path) -> None:
    words = [sys.executable, *shlex.split(command), "--out", str(tmp_path)]
    done = subprocess.run(
        words, cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.glob("*.json"))


def test_a_session_is_closed_once_it_is_idle(null_engine: SharedEngine) -> None:
    """Asked for while a chunk runs, as after a result that left before the chunk's last pass: it
    waits, and closes.
    """

    async def scenario() -> None:
        client = null_engine.client
        chunk = asyncio.create_task(
            client.send(session_id="s", prompt="x", options={"steps": 20, "step_ms": 20})
        )
        await client.until_at_step("s", 2)
        assert await client.engine.collective_rpc("close_session", args=("s",)) == [False]
        await close_session(client.engine, "s")
        assert chunk.done() and (await client.stats())["sessions"] == 0

    null_engine.run(scenario())
