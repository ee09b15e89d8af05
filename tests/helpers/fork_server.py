# SPDX-License-Identifier: Apache-2.0
"""`fork_server`: the server behind `multiprocessing`'s method `forkserver`, as a copy of this
process.

By itself that server is a new python, which takes 5 to 10 s of processor time to import torch and
vLLM. A process that has them imported already, and one thread, can fork it instead. Private parts
of `multiprocessing` that this touches: tests/test_quick_workers.py fails if they have moved.
Imports nothing that takes long.
"""

import os
import socket
from multiprocessing import connection, forkserver, util
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]
_ERRORS = 2


def server_environment() -> dict[str, str]:
    """The server's variables, besides this process's."""
    # it has this, not sys.path
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, **threads}


def fork_server() -> None:
    """From now on, processes of the method `forkserver` are forked from a copy of this one, made
    now.

    It ends when this process and those that it forked have ended; it writes where this one's errors
    go, and reads nothing.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.arbitrary_address("AF_UNIX"))  # type: ignore[attr-defined]
        listener.listen()
        address = listener.getsockname()
        if os.fork() == 0:
            try:
                os.close(alive_w)
                _be_quiet()
                util._finalizer_registry.clear()  # type: ignore[attr-defined]  # the parent's
                os.environ.update(server_environment())
                forkserver.main(listener.detach(), alive_r, [])
            finally:
                os._exit(0)
    os.close(alive_r)
    server._forkserver_address, server._forkserver_alive_fd = address, alive_w
    server.ensure_running = lambda: None


def _be_quiet() -> None:
    """Standard streams of the parent may be pipes that somebody reads to their end."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(_ERRORS, 1)
