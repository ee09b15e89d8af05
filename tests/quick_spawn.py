# SPDX-License-Identifier: Apache-2.0
"""`spawn` without its imports: engines that tests start in this process get their processes from
`rank_processes`.

vLLM's CPU platform starts an engine core and its workers with the method `spawn`, one after the
other, and each imports torch and vLLM for 5 to 10 s of CPU time. Here the server of
`rank_processes`, which has them imported, forks instead. As with `spawn`, such a process shares no
memory and no descriptors with its parent, has the parent's environment of the moment it was started
in, and can start others in the same way. Not as with `spawn`: the system's parent of all of them is
the forking server, and LD_PRELOAD has no effect. What tests start by command line (`vllm serve`)
spawns as ever, and so does every engine of a nightly test.
"""

import multiprocessing
import os
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

import setproctitle
from helpers.rank_processes import rank_context

_server: Any = forkserver._forkserver


def install() -> None:
    """Let the start method `spawn` fork from the server, in this process and in those it starts."""
    SpawnProcess._Popen = staticmethod(_Popen)  # type: ignore[method-assign, assignment]


class _Popen(popen_forkserver.Popen):
    """Starts a process as the method `forkserver` does, and hands environment and server over."""

    def __init__(self, process: BaseProcess) -> None:
        if multiprocessing.parent_process() is None:
            rank_context()
        super().__init__(_Departing(process))  # type: ignore[arg-type]


class _Departing:
    """Stands for a process on its way to the server; what arrives is the process itself."""

    def __init__(self, process: Any) -> None:
        self._name = process._name  # what the method `forkserver` asks a process for
        self._process = process

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (dict(os.environ), _server._forkserver_address, self._process)


def _arrive(environment: dict[str, str], address: str, process: BaseProcess) -> BaseProcess:
    setproctitle.getproctitle()  # finds the title's place by the environment's, which changes below
    os.environ.clear()
    os.environ.update(environment)
    _server._forkserver_address = address
    _server.ensure_running = lambda: None  # this process would start a server of its own
    install()
    return process
