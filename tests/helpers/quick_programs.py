# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs in new processes. If `quick_spawn` is installed, the fork server starts
them.

Importing the modules of a server and its engine takes 15 s of CPU time. Processes forked from the
fork server have already imported them. A forked program has the command line, environment, working
directory and output files that it would have in a new Python process. It also leads its own process
session, and a signal gives it the same exit status. However, a server's engine is not the server's
child process, so tests that need the process tree start a new Python process.
"""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Protocol
from unittest import mock

import psutil
from helpers import quick_spawn
from helpers.waits import seconds, wait_until

from vllm_omni.entrypoints.cli import demo

START_TIMEOUT_S = 600.0


class Program(Protocol):
    """The subset of `subprocess.Popen` that tests use."""

    @property
    def pid(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start_python(
    arguments: Sequence[str],
    output: Path,
    errors: Path,
    environ: Mapping[str, str],
    folder: Path | None = None,
    *,
    real: bool = False,
) -> Program:
    """Start `python ARGUMENTS`. The first argument is `-m` or a script.

    Args:
        output: File for stdout.
        errors: File for stderr. It may be the same as `output`.
        environ: The process's complete environment.
        folder: Working directory.
        real: Whether to start a new Python process even if the fork server is available.
    """
    for file in (output, errors):
        file.write_bytes(b"")
    if quick_spawn.is_installed() and not real:
        process = _QuickProgram(target=_run, args=(list(arguments), output, errors, folder))
        with mock.patch.dict(os.environ, environ, clear=True):
            process.start()
        return process
    with output.open("ab") as stdout, errors.open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environ,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def start_server(
    arguments: Sequence[str], log: Path, environ: Mapping[str, str], *, real: bool = False
) -> Program:
    """Start `vllm-omni` with the given arguments. Its stdout and stderr are written to `log`."""
    command = ["-m", "vllm_omni.entrypoints.cli.main", *arguments]
    return start_python(command, log, log, environ, real=real)


def is_healthy(port: int) -> bool:
    return demo.is_healthy(f"http://127.0.0.1:{port}/health")


def wait_until_healthy(process: Program, port: int, log: Path) -> None:
    """Wait until a server's health endpoint reports success. If the server exits first, fail with
    the end of its log.
    """

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        return is_healthy(port)

    wait_until(is_up, START_TIMEOUT_S, lambda: log.read_text()[-3000:], every_s=0.25)


def stop_server(process: Program) -> None:
    """Terminate a server, and kill it if it is still running after 20 s. Then kill any of its
    children that are still running.
    """
    children: list[psutil.Process] = []
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(seconds(20))
    except subprocess.TimeoutExpired:
        process.kill()
    kill_all(children)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.kill()


def run_python(
    *arguments: object,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` to completion.

    Args:
        limit_s: Time limit in seconds.
        environ: Variables in addition to those of this process.
        folder: Working directory. Default: this process's working directory.

    Raises:
        subprocess.TimeoutExpired: The program did not end in time and was killed.
    """
    command = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as scratch:
        output, errors = Path(scratch, "output"), Path(scratch, "errors")
        variables = {**os.environ, **(environ or {})}
        process = start_python(command, output, errors, variables, folder or Path.cwd())
        try:
            status = process.wait(seconds(limit_s))
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, status, output.read_text(), errors.read_text())


class _QuickProgram(SpawnProcess):
    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self.exitcode


def _run(arguments: list[str], output: Path, errors: Path, folder: Path | None) -> None:
    # Configure vLLM's logger again, because its configuration dates from vLLM's import, when the
    # environment variables were different.
    from vllm.logger import _configure_vllm_root_logger

    os.setsid()
    quick_spawn.write_output_to(output, errors)
    if folder is not None:
        os.chdir(folder)
    _configure_vllm_root_logger()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends processes without running exit functions
