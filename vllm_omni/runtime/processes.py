# SPDX-License-Identifier: Apache-2.0
"""Processes of one engine: their ids, and a thread that ends them when their parent ends.

vLLM stops its engine during a shutdown, but cannot do so after `kill -9`. The engine would then
wait for requests forever and occupy its device's memory. `end_with_parent` therefore starts a
thread that waits, without polling, until the parent process ends. Unless the parent is a main
process, the thread also watches the grandparent, because the server starts the engine core and the
engine core starts the workers. `end_with_parent` has an effect only in processes that Python's
`multiprocessing` started. Ray workers and an engine in the user's own process are therefore not
affected.

Workers call `end_with_parent` before they load a model. Schedulers and the diffusers executor's
`PipelineWorker` also call it, because they run in the engine core. The `vllm_omni` and
`vllm_omni_ar` plugins call it in each API server process. This module imports neither vLLM nor
torch.
"""

import contextlib
import logging
import multiprocessing
import os
import select
import threading
from typing import Any, Final

from vllm_omni.runtime.exit_codes import ENGINE_DIED

logger = logging.getLogger("vllm." + __name__)

_MAIN: Final = "MainProcess"
"""Name that `multiprocessing` uses for a process that it has not started."""
_lock = threading.Lock()
_watching: list[threading.Thread] = []


def machine_id() -> str:
    """Return an identifier that is equal for two processes if and only if each can use the other's
    pid.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def engine_processes() -> dict[str, Any]:
    """Return the pids of this process and of the engine core that started it, if any.

    Returns:
        `{"machine": machine_id(), "pids": [...]}`.
    """
    parent = multiprocessing.parent_process()
    pids = [os.getpid()]
    if parent is not None and parent.name != _MAIN and parent.pid is not None:
        pids.append(parent.pid)
    return {"machine": machine_id(), "pids": pids}


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP, Ctrl-Z). A process stopped by a debugger does
    not count as stopped.
    """
    return _stat_of(pid)[:1] == ["T"]


def end_with_parent() -> None:
    """Make this process exit with status 70 as soon as its parent has ended.

    The end of the grandparent has the same effect, unless the parent is a main process. Idempotent.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    with _lock:
        if _watching:
            return
        pids = [parent.pid]
        if parent.name != _MAIN and (stat := _stat_of(parent.pid)):
            pids.append(int(stat[1]))
        thread = threading.Thread(target=_watch, args=(pids,), daemon=True, name="ParentWatch")
        _watching.append(thread)
        thread.start()


def _watch(pids: list[int]) -> None:
    poll = select.poll()
    watched: dict[int, int] = {}
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            _end(pid)
        except OSError as error:  # kernels before 5.3 and some sandboxes lack the system call
            logger.warning(
                "cannot watch process %d, this process will not exit with it: %s", pid, error
            )
        else:
            watched[descriptor] = pid
            poll.register(descriptor, select.POLLIN)
    if watched:
        [(descriptor, _), *_] = poll.poll()
        _end(watched[descriptor])


def _end(pid: int) -> None:
    logger.critical("process %d, on which this process depends, has ended; exiting", pid)
    os._exit(ENGINE_DIED)


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the state. The list is empty if the
    process does not exist.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []
