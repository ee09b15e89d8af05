# SPDX-License-Identifier: Apache-2.0
"""An engine's processes end when their parents end. The tests start and kill real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from helpers.programs import has_ended
from helpers.waits import wait_until

from vllm_omni.runtime.processes import end_with_parent, engine_processes, is_stopped

TREE = """
import multiprocessing, sys, time
from vllm_omni.runtime.processes import end_with_parent, engine_processes

def worker():
    end_with_parent()
    print("worker", *engine_processes()["pids"], flush=True)
    time.sleep(60)

def core():
    child = multiprocessing.get_context("spawn").Process(target=worker, name="Worker")
    child.start()
    if sys.argv[1:] != ["loading"]:
        end_with_parent()
    print("core", *engine_processes()["pids"], flush=True)
    child.join()
    time.sleep(60)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=core, name="EngineCore")
    child.start()
    print("server", *engine_processes()["pids"], flush=True)
    child.join()
    time.sleep(60)
"""


@pytest.fixture
def tree(
    tmp_path: "os.PathLike[str]", request: pytest.FixtureRequest
) -> "Iterator[dict[str, list[int]]]":
    """Start a server, its engine core and a worker, and yield the result of `engine_processes` in
    each process, by process name.
    """
    script = os.path.join(tmp_path, "tree.py")
    with open(script, "w") as file:
        file.write(TREE)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    command = [sys.executable, script, *getattr(request, "param", [])]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    assert server.stdout is not None
    lines = [server.stdout.readline().split() for _ in range(3)]
    pids = {name: [int(pid) for pid in rest] for name, *rest in lines}
    family = [psutil.Process(own) for own, *_ in pids.values()]
    yield pids
    for process in family:
        if process.is_running():
            process.kill()
    server.wait()


def test_a_worker_reports_its_engine_core_and_a_core_does_not_report_the_server(
    tree: dict[str, list[int]],
) -> None:
    """In a worker, `engine_processes` also lists the engine core. In an engine core, it does not
    list the server.
    """
    server, core, worker = (tree[name][0] for name in ("server", "core", "worker"))
    assert tree == {"server": [server], "core": [core], "worker": [worker, core]}


@pytest.mark.parametrize("tree", [[], ["loading"]], indirect=True, ids=["serving", "loading"])
def test_all_end_with_the_server(tree: dict[str, list[int]]) -> None:
    """When the server ends, all processes below it in the process tree end too.

    This includes a worker that is still loading, while its engine core does not watch the server
    yet.
    """
    os.kill(tree["server"][0], signal.SIGKILL)
    wait_until(lambda: has_ended(tree["worker"][0]), 3)


def test_a_worker_ends_with_its_engine_core(tree: dict[str, list[int]]) -> None:
    """When the engine core ends, its worker ends too. The server stays alive, because it must
    notify its clients.
    """
    os.kill(tree["core"][0], signal.SIGKILL)
    wait_until(lambda: has_ended(tree["worker"][0]), 3)
    assert psutil.Process(tree["server"][0]).status() != psutil.STATUS_ZOMBIE


def test_a_process_that_no_server_started_watches_no_parent() -> None:
    """A process that was not started by a server watches no parent, so an engine in a user's
    process outlives the user's shell.
    """
    end_with_parent()
    assert engine_processes()["pids"] == [os.getpid()]


def test_a_stopped_process_is_distinguished_from_a_sleeping_one() -> None:
    """`is_stopped` returns true for a stopped process, and false for a sleeping process and for a
    process that has ended.
    """
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_stopped(process.pid))
        process.kill()
    assert not is_stopped(process.pid)
