# SPDX-License-Identifier: Apache-2.0
"""Processes of a real `vllm serve --omni` die or stop: who is told, how soon, what is left over, and the exit status.

Times are bounds on what the operations page promises; each test prints what it measured (`pytest -s`).
"""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from fake_engine import FIRST, wait_until
from served import AUTHORIZED, HEIGHT, MAX_SESSIONS, WIDTH, Served
from session_calls import request
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from vllm_omni.exit_codes import ENGINE_DIED

RANK_TIMEOUT_S = 2.0
OMNI = {"height": HEIGHT, "width": WIDTH, "max_sessions": MAX_SESSIONS, "rank_timeout_s": RANK_TIMEOUT_S}
MP = ("--distributed-executor-backend", "mp")

Start = Callable[..., Served]


@pytest.fixture
def start(null_world: Path, tmp_path: Path) -> Iterator[Start]:
    """`start("--flag", ..., omni={...})`: a healthy server; it, and whatever it left, is gone after the test."""
    with ExitStack() as stack:

        def begin(*flags: str, **omni: Any) -> Served:
            config = msgspec.json.encode({"omni": {**OMNI, **omni}}).decode()
            server = Served(null_world, tmp_path, "--additional-config", config, *flags)
            stack.callback(server.stop)
            server.wait_until_healthy()
            stack.callback(kill_all, family(server))
            return server

        yield begin


def family(server: Served) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.kill()


def named(server: Served, name: str) -> psutil.Process:
    return next(child for child in family(server) if name in " ".join(child.cmdline()))


class Watcher:
    """Clients of three kinds, and when each of them learned that the engine is dead."""

    def __init__(self, server: Served) -> None:
        self._idle = server.client()
        self._idle.send(request(FIRST, session_id="idle"))
        self._idle.frames()
        self._busy = server.client()
        self._busy.send(request(FIRST, session_id="busy", options={"steps": 200, "step_ms": 100.0}))
        url = f"ws://127.0.0.1:{server.port}/v1/realtime_video/generate"
        self._silent = connect(url, compression=None, max_size=None, additional_headers=AUTHORIZED)
        wait_until(lambda: server.running_requests() == 1)

    def wait(self, since_s: float, timeout_s: float) -> dict[str, tuple[float, int, str]]:
        """Kind of client -> (seconds since `since_s`, close code, code of the error before it)."""

        def ended(connection: Any) -> tuple[float, int, str]:
            code = ""
            try:
                while True:
                    message = msgspec.msgpack.decode(connection.recv(timeout_s))
                    code = message.get("code", message.get("type", ""))
            except ConnectionClosed as closed:
                return time.monotonic() - since_s, closed.rcvd.code if closed.rcvd is not None else 1006, code

        connections = {
            "idle": self._idle.connection,
            "busy": self._busy.connection,
            "silent": self._silent,
        }
        with ThreadPoolExecutor(len(connections)) as threads:
            futures = {name: threads.submit(ended, connection) for name, connection in connections.items()}
            return {name: future.result() for name, future in futures.items()}


def gone_after(processes: list[psutil.Process], since_s: float, timeout_s: float) -> float:
    """Seconds until none of them runs."""
    psutil.wait_procs(processes, timeout=timeout_s)
    alive = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [" ".join(process.cmdline())[:80] for process in alive]
    return time.monotonic() - since_s


def check_engine_death(server: Served, victim: psutil.Process, how: signal.Signals, told_within_s: float) -> None:
    """Every client is told in time, the server ends with the documented status, and nothing is left."""
    watcher, others = Watcher(server), family(server)
    since_s = time.monotonic()
    victim.send_signal(how)
    told = watcher.wait(since_s, told_within_s + 10)
    status = server.process.wait(20)
    exited_s = time.monotonic() - since_s
    print(how.name, {name: (round(s, 2), code, error) for name, (s, code, error) in told.items()}, status, exited_s)
    assert {code for _, code, _ in told.values()} == {1011}
    assert told["idle"][2] == told["busy"][2] == "engine_error"
    assert max(seconds for seconds, _, _ in told.values()) < told_within_s
    assert status == ENGINE_DIED
    gone_after(others, since_s, 5)


def test_a_stopped_worker_counts_as_a_dead_engine(start: Start) -> None:
    """One rank, stopped (SIGSTOP): after `rank_timeout_s` it is ended, clients are told, the server exits with 70."""
    server = start(*MP)
    check_engine_death(server, named(server, "Worker"), signal.SIGSTOP, RANK_TIMEOUT_S + 2)


def test_nothing_outlives_a_killed_server(start: Start, tmp_path: Path) -> None:
    """`kill -9` of the server's own process, while a chunk is made: its engine and worker end within 5 s."""
    server = start(*MP, snapshot_dir=str(tmp_path / "spool"))
    Watcher(server)
    others = family(server)
    assert any("EngineCore" in " ".join(process.cmdline()) for process in others)
    assert any("Worker" in " ".join(process.cmdline()) for process in others)
    since_s = time.monotonic()
    server.process.kill()
    server.process.wait()
    print("all gone after", gone_after(others, since_s, 5))
