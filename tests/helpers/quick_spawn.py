# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM's `spawn` processes from the fork server in `rank_processes`.

vLLM's CPU platform starts the engine core and each worker with the `spawn` start method. Each of
these processes spends 5 to 10 s of CPU time importing torch and vLLM.
`VLLM_WORKER_MULTIPROC_METHOD` allows only `spawn` and `fork`, and `fork` is unsafe in a
multithreaded process. `install` therefore makes `spawn` fork from the fork server, which has
already imported the libraries and has only one thread.

As with `spawn`, a process shares neither memory nor file descriptors with its parent. Its
environment is the parent's at the time of the start, and it can start processes in the same way.
There are two differences from `spawn`: the fork server is every process's parent in the operating
system, and LD_PRELOAD has no effect. Engines of nightly tests, and engines of servers that run in a
new Python process, use the real `spawn`.
"""

import multiprocessing
import os
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import setproctitle
from helpers.rank_processes import rank_context

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]
_outputs: tuple[Path, Path] | None = None


def install() -> None:
    """Make the `spawn` start method fork from the fork server, in this process and its children."""
    SpawnProcess._Popen = staticmethod(_Popen)  # type: ignore[method-assign, assignment]


def is_installed() -> bool:
    return SpawnProcess._Popen is _Popen  # type: ignore[comparison-overlap]


def write_output_to(output: Path, errors: Path) -> None:
    """Append the stdout and stderr of this process and its future child processes to files."""
    global _outputs
    _outputs = (output, errors)
    for number, path in enumerate(_outputs, 1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)


class _Popen(popen_forkserver.Popen):
    """Starts a process as `forkserver` does, and also sends it the environment and the fork
    server's address.
    """

    def __init__(self, process: BaseProcess) -> None:
        if multiprocessing.parent_process() is None:
            rank_context()
        super().__init__(_PickledProcess(process))  # type: ignore[arg-type]


class _PickledProcess:
    """A wrapper that pickles a process as a `_receive` call. In the child, this call returns the
    process.
    """

    def __init__(self, process: Any) -> None:
        self._name = process._name  # read by `popen_forkserver`
        self._process = process

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (dict(os.environ), _server._forkserver_address, _outputs, self._process)


def _receive(
    environment: dict[str, str],
    address: str,
    outputs: tuple[Path, Path] | None,
    process: BaseProcess,
) -> BaseProcess:
    if outputs is not None:
        write_output_to(*outputs)
    # Let setproctitle locate the process title now, because doing so requires the original
    # environment, which is replaced below.
    setproctitle.getproctitle()
    os.environ.clear()
    os.environ.update(environment)
    _server._forkserver_address = address
    _server.ensure_running = lambda: None  # otherwise this process would start its own server
    install()
    return process
