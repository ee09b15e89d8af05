# SPDX-License-Identifier: Apache-2.0
"""The processes of `pytest -n` are forked from one that has the libraries imported.

Importing torch and vLLM takes each of them 7 s of processor time. Here one process (`serve`)
imports, and forks when a program that xdist starts in the place of `python` (`join`) asks it to. It
has one thread and computes nothing. An import that fails there is left to the processes, which say
so. Each of them forks in its turn the server that ranks and engines are forked from
(helpers/fork_server.py). Held by test_quick_workers.py.

PYTEST_DONT_REWRITE, since pytest finds this module and some of its plugins imported already.
"""

import atexit
import contextlib
import gc
import importlib
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from helpers.fork_server import fork_server

IMPORTED = (
    *(
        "vllm_omni.model_executor.vllm_model",
        "diffusers.models.autoencoders",
        "torch._dynamo",
        "transformers",
    ),
    *(
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.engine.async_llm",
    ),
    "helpers.models_inspected_here",
)
"""What takes long, and what saves more of it."""
_PLUGINS = ("anyio",)
"""Packages among them that bring a plugin of pytest, which it would like to import itself."""
_STANDARD_STREAMS = (0, 1, 2)
_PID_BYTES = 4
_HERE = Path(__file__).parent


def pytest_xdist_setupnodes(config: Any, specs: Sequence[Any]) -> None:
    import torch

    ours = [spec for spec in specs if spec.popen and spec.python is None]
    if ours and torch.version.cuda is None:
        running = contextlib.ExitStack()
        config.add_cleanup(running.close)
        address = running.enter_context(server(IMPORTED))
        for spec in ours:
            spec.python = shlex.join(command("join", address))


@contextlib.contextmanager
def server(modules: Sequence[str]) -> Iterator[str]:
    """A process that forks, by the address that `join` needs."""
    with (
        tempfile.TemporaryDirectory(prefix="workers") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(address := f"{folder}/socket")
        listener.listen()
        serving = command("serve", str(listener.fileno()), *modules)
        with subprocess.Popen(serving, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]):
            yield address


def command(function: str, *arguments: str) -> list[str]:
    """A python in which `__main__` is no file, as in processes of xdist: others that are spawned
    there would run it.
    """
    path = [str(_HERE), str(_HERE.parent)]
    code = (
        f"import sys; sys.path[:0] = {path!r}; import quick_workers; "
        f"quick_workers.{function}(sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *arguments]


def join(arguments: Sequence[str]) -> None:
    """Be a process that is forked from the server: it has this one's streams, and this one ends
    with it.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(arguments[0])
        socket.send_fds(connection, [b"1"], _STANDARD_STREAMS)
        pid = int.from_bytes(connection.recv(_PID_BYTES), "little")
    # else the server has ended; a closed connection would not do: python closes those early in its
    # own end
    if pid:
        select.select([os.pidfd_open(pid)], [], [])


def serve(arguments: Sequence[str]) -> None:
    """Fork for each connection, until standard input ends."""
    listening, *modules = arguments
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for name in _PLUGINS:
        if name in sys.modules:
            sys.modules[name].__doc__ = __doc__
    gc.collect()
    gc.freeze()  # garbage collections need not look through it
    atexit.register(gc.unfreeze)  # native libraries complain about what is never collected
    listener = socket.socket(fileno=int(listening))
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        _, streams, *_ = socket.recv_fds(connection, 1, len(_STANDARD_STREAMS))
        pid = os.fork()
        if pid == 0:
            listener.close()
            connection.close()
            _run(streams)
            return
        with contextlib.suppress(OSError), connection:  # it may have been ended meanwhile
            connection.sendall(pid.to_bytes(_PID_BYTES, "little"))
        for stream in streams:
            os.close(stream)


def _run(streams: Sequence[int]) -> None:
    """In the fork: what `python -c` of execnet does."""
    for stream, descriptor in zip(_STANDARD_STREAMS, streams, strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    fork_server()  # now, while this is one thread
    exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))
