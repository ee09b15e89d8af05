# SPDX-License-Identifier: Apache-2.0
"""Start `vllm-omni` servers as subprocesses, from the fork server where `quick_spawn` is installed.

The imports of an API server and of its engine take 15 s of CPU time, which a process of the fork
server does not need. It runs the same command line with the same environment, as the leader of a
session and with its output in a file. Its exit status and its reaction to signals are the same.
The engine is no child of it, so tests that need the tree of processes start a real one.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Protocol
from unittest import mock

from helpers import quick_spawn


class ServerProcess(Protocol):
    """What tests use of `subprocess.Popen`."""

    @property
    def pid(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start_server(
    arguments: Sequence[str], log: Path, environ: Mapping[str, str], *, real: bool = False
) -> ServerProcess:
    """Start `vllm-omni` with the arguments.

    Args:
        log: File for its output.
        environ: Its whole environment.
        real: Start a new Python in any case.
    """
    if quick_spawn.is_installed() and not real:
        log.touch()
        process = _QuickServer(target=_run, args=(list(arguments), log))
        with mock.patch.dict(os.environ, environ, clear=True):
            process.start()
        return process
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environ,
        )


class _QuickServer(SpawnProcess):
    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("vllm-omni", timeout or 0.0)
        return self.exitcode


def _run(arguments: list[str], log: Path) -> None:
    # vLLM configures its logger when it is imported, which was in another environment.
    from vllm.logger import _configure_vllm_root_logger

    from vllm_omni.entrypoints.cli.main import main

    os.setsid()
    quick_spawn.write_output_to(log)
    sys.argv = ["vllm-omni", *arguments]
    _configure_vllm_root_logger()
    main()
