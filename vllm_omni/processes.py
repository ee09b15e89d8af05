# SPDX-License-Identifier: Apache-2.0
"""The processes of one engine: which they are, and that none outlives the process it works for.

vLLM tells its engine to stop when it stops itself. After `kill -9` it cannot: the engine waits for requests for ever
and keeps its device's memory. `end_with_parent` starts a thread that waits, without polling, for the end of the process
that started this one, and of that one's own parent if it is no main process: a worker is started by its engine core,
an engine core by the server. Only processes of Python's `multiprocessing` have such a parent; Ray's workers, and an
engine in the user's own process, are watched by nobody here.

Called by workers (before they load) and by schedulers, which live in the engine core. Knows no vLLM and no torch.
Held by tests/test_processes.py and tests/entrypoints/realtime/test_death_served.py.
"""

import contextlib
import logging
import multiprocessing
import os
import select
import threading
from typing import Any, Final

from vllm_omni.exit_codes import ENGINE_DIED

logger = logging.getLogger("vllm." + __name__)

_MAIN: Final = "MainProcess"
"""`multiprocessing`'s name for a process that it did not start."""
_lock = threading.Lock()
_watching: list[threading.Thread] = []


def machine_id() -> str:
    """Equal for two processes exactly if they see each other's process ids."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def engine_processes() -> dict[str, Any]:
    """This process, and the engine core that started it, if one did: `{"machine": ..., "pids": [...]}`."""
    parent = multiprocessing.parent_process()
    pids = [os.getpid()]
    if parent is not None and parent.name != _MAIN and parent.pid is not None:
        pids.append(parent.pid)
    return {"machine": machine_id(), "pids": pids}


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP, Ctrl-Z); one that a debugger holds was not."""
    return _stat_of(pid)[:1] == ["T"]


def end_with_parent() -> None:
    """From now on this process ends, at once and with status 70, when one it works for has ended. Idempotent."""
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
        except OSError as error:  # a kernel before 5.3, or a sandbox without this call
            logger.warning("this process does not notice when process %d ends: %s", pid, error)
        else:
            watched[descriptor] = pid
            poll.register(descriptor, select.POLLIN)
    if watched:
        [(descriptor, _), *_] = poll.poll()
        _end(watched[descriptor])


def _end(pid: int) -> None:
    logger.critical("process %d, which this one works for, has ended: this one ends, too", pid)
    os._exit(ENGINE_DIED)


def _stat_of(pid: int) -> list[str]:
    """State, parent and the rest of /proc/PID/stat; [] if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []
