# SPDX-License-Identifier: Apache-2.0
"""Tests of `EngineWatch` in a real server process without an engine: exit status, notification and
normal shutdown.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ports import port_for_a_server
from helpers.waits import exactly, pause, seconds, wait_until

from vllm_omni.runtime.exit_codes import ENGINE_DIED

SERVER = """
import asyncio, os, sys, types
sys.modules["vllm"] = types.ModuleType("vllm")  # importing the real one takes 10 s; only this variable of it is read
sys.modules["vllm"].envs = types.SimpleNamespace(VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=False)
import contextlib
import uvicorn
import uvloop
from fastapi import FastAPI
from vllm_omni.entrypoints.engine.engine_watch import EngineWatch

class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # vLLM's server installs no signal handlers of its own either
        yield

port, engine, worker = map(int, sys.argv[1:])

def is_dead():
    with contextlib.suppress(OSError):
        return open(f"/proc/{engine}/stat").read().rpartition(")")[2].split()[0] in "ZX"
    return True

async def tell():
    print("told", flush=True)

async def main():
    app, watch = FastAPI(), EngineWatch()
    app.add_api_route("/health", lambda: "fine")
    watch.attach_to_app(app)
    watch.start_watching(is_dead, [engine, worker, os.getpid()], 1.0, tell)
    server = app.state.server = Server(uvicorn.Config(app, port=port, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    stop = asyncio.Event()
    for number in (2, 15):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        os.kill(engine, 9)  # as vLLM does: the engine goes first
        await asyncio.sleep(0.5)
        server.should_exit = True
    await serving

uvloop.run(main())
"""  # noqa: E501


class Serving:
    """A server and two sleeping processes that stand in for its engine core and a worker. `is_dead`
    checks only the engine core.
    """

    def __init__(self) -> None:
        port = port_for_a_server()
        self.engine, self.worker = (subprocess.Popen(["sleep", "120"]) for _ in range(2))
        command = [
            sys.executable,
            "-c",
            SERVER,
            str(port),
            str(self.engine.pid),
            str(self.worker.pid),
        ]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        url = f"http://127.0.0.1:{port}/health"
        wait_until(lambda: self._answers(url), 60)

    def _answers(self, url: str) -> bool:
        assert self.process.poll() is None, self.process.communicate()[1]
        try:
            urllib.request.urlopen(url, timeout=seconds(5)).close()
        except OSError:
            return False
        return True

    def end(self) -> tuple[int, str, str]:
        """Wait until the server has exited. Return its exit status, output and log."""
        out, log = self.process.communicate(timeout=seconds(20))
        return self.process.returncode, out, log


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving()
    yield serving
    for process in (serving.process, serving.engine, serving.worker):
        process.kill()
        process.wait()


def test_a_dead_engine_ends_the_server_with_its_status(serving: Serving) -> None:
    """When the engine dies, the server first sends the notification. It then exits with the
    documented status and without a traceback.
    """
    serving.engine.kill()
    status, out, log = serving.end()
    assert (status, out) == (ENGINE_DIED, "told\n")
    assert "Traceback" not in log and "never retrieved" not in log


def test_a_dead_worker_is_reported_before_the_engine_core_ends(serving: Serving) -> None:
    """A dead worker is reported immediately, although vLLM's engine core waits several seconds for
    the other workers. When the server exits, the engine's remaining processes are killed.
    """
    killed_s = time.monotonic()
    serving.worker.kill()
    assert serving.process.stdout is not None
    assert serving.process.stdout.readline() == "told\n"
    reported_s = time.monotonic() - killed_s
    assert serving.end()[0] == ENGINE_DIED
    assert serving.engine.wait(seconds(5)) == -signal.SIGKILL
    assert reported_s < seconds(1.0)


def test_a_stopped_engine_is_killed_after_the_time_limit(serving: Serving) -> None:
    """An engine that stays stopped by SIGSTOP beyond a time limit is reported as dead and killed.
    An engine that resumes within the limit is left running.
    """
    serving.engine.send_signal(signal.SIGSTOP)
    exactly(0.5)  # half the time limit for a stopped engine
    serving.engine.send_signal(signal.SIGCONT)
    pause(1.2)
    assert serving.process.poll() is None
    started_s = time.monotonic()
    serving.engine.send_signal(signal.SIGSTOP)
    assert serving.end()[0] == ENGINE_DIED
    assert time.monotonic() - started_s > 0.7
    assert serving.engine.wait() == -signal.SIGKILL


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_exits_with_0(serving: Serving, how: signal.Signals) -> None:
    """When a server is stopped, its engine ends first and is not reported as dead."""
    os.kill(serving.process.pid, how)
    assert serving.end()[:2] == (0, "")
