# SPDX-License-Identifier: Apache-2.0
"""The plain `vllm serve` command that `--omni` prints serves the same world."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from helpers.ports import port_for_a_server
from helpers.quick_programs import Program, start_python, stop_server, wait_until_healthy
from helpers.waits import seconds
from websockets.sync.client import connect

from vllm_omni.entrypoints.cli import demo, serve


@pytest.mark.engine
@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["forked", "shell"]
)
def test_the_printed_command_serves(real: bool, null_world: Path, tmp_path: Path) -> None:
    """Plain `vllm serve` with the printed flags and environment variable serves the endpoint, which
    sends the model's hello message. OMP_NUM_THREADS applies in the server's engine process.

    The nightly test runs the printed line in a shell.
    """
    port = port_for_a_server()
    planned = serve.plan(
        [str(null_world), "--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "4"],
        os.environ,
        serve.installed_plugins(),
    )
    variable, program, *arguments = shlex.split(planned.plain_command)
    assert program == "vllm"
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    log = tmp_path / "server.log"
    process: Program
    if real:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                f"exec env {planned.plain_command}",
                shell=True,
                env={**environ, "PATH": path},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    else:
        name, _, value = variable.partition("=")
        command = ["-m", "vllm.entrypoints.cli.main", *arguments]
        process = start_python(command, log, log, {**environ, name: value})
    try:
        wait_until_healthy(process, port, log)
        with connect(f"ws://127.0.0.1:{port}{demo.ENDPOINT}", compression=None) as endpoint:
            hello = msgspec.msgpack.decode(endpoint.recv(timeout=seconds(30)))
        assert (hello["first_chunk_frames"], hello["chunk_frames"]) == (9, 12)
        assert f"this rank uses {os.environ['OMP_NUM_THREADS']} CPU threads" in log.read_text()
        process.terminate()
        assert process.wait(seconds(30)) == 0
    finally:
        stop_server(process)
