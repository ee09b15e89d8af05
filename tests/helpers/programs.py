# SPDX-License-Identifier: Apache-2.0
"""Runs programs that must end within a time limit, and starts servers as users do.

If a program fails, `run_program` kills all of its processes and fails the test with the program's
output. `limited_rank` is for ranks started by torchrun, each of which runs in its own process
session: shortly before the time limit, the rank dumps its thread stacks and exits. `has_ended`
works for any process.
"""

import contextlib
import faulthandler
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from helpers.waits import seconds

REPO = Path(__file__).parents[2]
_RANK_LIMIT = "TESTS_RANK_LIMIT_S"
_STACKS_S = 10
"""Time in seconds between a rank's dump of its stacks and the time limit."""
_SHOWN = 8000
"""Number of characters at the end of the output that a failure message shows."""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended. A zombie, whose parent has not yet waited for it, counts
    as ended.
    """
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_program(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Run a program and return its stdout and stderr.

    The program can import this repository's `vllm_omni` and `tests/helpers`. The test fails if the
    program exits with an error or does not end in time.

    Args:
        environment: Variables in addition to those of this process.
        limit_s: Time limit in seconds.
    """
    variables = {**os.environ, _RANK_LIMIT: str(max(1, limit_s - _STACKS_S)), **environment}
    path = [
        str(REPO),
        str(REPO / "tests"),
        environment.get("PYTHONPATH"),
        os.environ.get("PYTHONPATH"),
    ]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with tempfile.TemporaryFile("w+") as output:
        program = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            program.wait(limit_s)
            ending = f"ended with status {program.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"had not ended after {limit_s:g} s"
        finally:
            _kill_tree(program)
        output.seek(0)
        text = output.read()
    if program.returncode != 0:
        pytest.fail(f"{command[0]} {ending}; its output ended with:\n{text[-_SHOWN:]}")
    return text


@contextmanager
def background_server(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """Run the package's command in `folder`, as a reader who follows a guide would.

    Args:
        arguments: Command arguments, for example `serve` and its options.
        folder: Working directory. All output is written to `server.log` in this directory.
        environment: The process's environment.

    Yields:
        The process, which is terminated after the block, and the path to its log.
    """
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", *arguments],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield server, log
    finally:
        server.terminate()
        try:
            server.wait(seconds(60))
        except subprocess.TimeoutExpired:
            server.kill()


def _kill_tree(program: "subprocess.Popen[bytes]") -> None:
    if program.poll() is not None:
        return
    descendants = psutil.Process(program.pid).children(recursive=True)
    program.kill()
    program.wait()
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(descendants, timeout=seconds(10))


def limited_rank() -> None:
    """Set this rank's time limit. Each rank process of a program started by `run_program` must call
    this function first.
    """
    faulthandler.dump_traceback_later(float(os.environ[_RANK_LIMIT]), exit=True)
