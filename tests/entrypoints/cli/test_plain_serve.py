# SPDX-License-Identifier: Apache-2.0
"""The command that `--omni` prints is the real thing: pasted into a shell, it serves the same world."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from helpers.ports import port_for_a_server
from websockets.sync.client import connect

from vllm_omni.entrypoints.cli import demo, serve


@pytest.mark.engine
def test_the_printed_command_serves(null_world: Path, tmp_path: Path) -> None:
    """Plain `vllm serve` with the printed flags and variable has the door, and its hello is the model's."""
    port = port_for_a_server()
    planned = serve.plan(
        [str(null_world), "--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "4"],
        os.environ,
        serve.installed_plugins(),
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            f"exec env {planned.plain_command}",
            shell=True,
            env={**os.environ, "PATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 600
        while not demo.answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.25)
        with connect(f"ws://127.0.0.1:{port}{demo.DOOR}", compression=None) as door:
            hello = msgspec.msgpack.decode(door.recv(timeout=30))
        assert (hello["first_chunk_frames"], hello["chunk_frames"]) == (9, 12)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
