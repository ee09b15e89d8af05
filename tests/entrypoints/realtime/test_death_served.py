# SPDX-License-Identifier: Apache-2.0
"""Process death, SIGSTOP and a full disk with a real `vllm serve --omni`: the errors and close
codes that clients get, the exit status, and the processes and files that remain.

The time limits are those stated on the operations page. Each test prints its measurements (`pytest
-s`).
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from helpers.fake_engine import FIRST, LATER
from helpers.programs import has_ended
from helpers.quick_programs import kill_all
from helpers.served import AUTHORIZED, SIZES, Served, family, mortal_servers
from helpers.waits import seconds, wait_until
from session_calls import call, code_of, request
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from vllm_omni.runtime.exit_codes import ENGINE_DIED
from vllm_omni.session_files.recording import read_recording as read_recording

RANK_TIMEOUT_S = 2.0
OMNI = {"rank_timeout_s": RANK_TIMEOUT_S}
MP = ("--distributed-executor-backend", "mp")


Start = Callable[..., Served]


@pytest.fixture
def start(null_world: Path, tmp_path: Path) -> Iterator[Start]:
    with mortal_servers(null_world, tmp_path, OMNI) as start:
        yield start


def named(server: Served, name: str) -> psutil.Process:
    return next(child for child in family(server) if name in " ".join(child.cmdline()))


class Watcher:
    """An idle, a busy and a silent client, and the times at which they are notified that the engine
    is dead.
    """

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
        """Return {client kind: (seconds since `since_s`, close code, code of the error before the
        close)}.
        """

        def ended(connection: Any) -> tuple[float, int, str]:
            code = ""
            try:
                while True:
                    message = msgspec.msgpack.decode(connection.recv(timeout_s))
                    code = message.get("code", message.get("type", ""))
            except ConnectionClosed as closed:
                return (
                    time.monotonic() - since_s,
                    closed.rcvd.code if closed.rcvd is not None else 1006,
                    code,
                )

        connections = {
            "idle": self._idle.connection,
            "busy": self._busy.connection,
            "silent": self._silent,
        }
        with ThreadPoolExecutor(len(connections)) as threads:
            futures = {
                name: threads.submit(ended, connection) for name, connection in connections.items()
            }
            return {name: future.result() for name, future in futures.items()}


def gone_after(processes: list[psutil.Process], since_s: float, timeout_s: float) -> float:
    """Return the number of seconds from `since_s` until none of the processes is running."""
    psutil.wait_procs(processes, timeout=timeout_s)
    alive = [
        process for process in processes if process.is_running() and not has_ended(process.pid)
    ]
    assert not alive, [" ".join(process.cmdline())[:80] for process in alive]
    return time.monotonic() - since_s


def check_engine_death(
    server: Served, victim: psutil.Process, how: signal.Signals, reported_within_s: float
) -> None:
    """Check that every client gets an error in time, the server exits with the documented status,
    and no process remains.
    """
    watcher, others = Watcher(server), family(server)
    since_s = time.monotonic()
    victim.send_signal(how)
    reported = watcher.wait(since_s, reported_within_s + 10)
    status = server.process.wait(seconds(20))
    exited_s = time.monotonic() - since_s
    print(
        how.name,
        {name: (round(s, 2), code, error) for name, (s, code, error) in reported.items()},
        status,
        exited_s,
    )
    assert {code for _, code, _ in reported.values()} == {1011}
    assert reported["idle"][2] == reported["busy"][2] == "engine_error"
    assert max(seconds for seconds, _, _ in reported.values()) < reported_within_s
    assert status == ENGINE_DIED
    gone_after(others, since_s, 5)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a separate 4 MiB disk."""
    mounted = tmp_path_factory.mktemp("disk")
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mounted)], check=True)
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


@pytest.fixture(scope="module")
def small(
    null_world: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Start a server that writes all its files to the small disk. The last test kills this
    server.
    """
    omni = {**SIZES, **OMNI, "snapshot_dir": str(disk), "record_dir": str(disk / "records")}
    environ = {"VLLM_OMNI_MEDIA_DIR": str(disk / "media"), "VLLM_LOGGING_LEVEL": "INFO"}
    config = msgspec.json.encode({"omni": omni}).decode()
    server = Served(
        null_world,
        tmp_path_factory.mktemp("small"),
        "--additional-config",
        config,
        *MP,
        environ=environ,
        real=True,
    )
    try:
        server.wait_until_healthy()
        left = family(server)
        yield server
        kill_all(left)
    finally:
        server.stop()


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Keep the disk full until the `with` block ends."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        yield
    finally:
        filler.unlink()


def post(
    server: Served, path: str, body: bytes, kind: str = "application/json"
) -> tuple[int, bytes, dict[str, str]]:
    return call(server, "POST", path, body, {**AUTHORIZED, "Content-Type": kind})


def files_of(disk: Path) -> set[str]:
    return {
        str(path.relative_to(disk))
        for path in disk.rglob("*")
        if path.is_file() and "records" not in path.parts
    }


VIDEO = b'{"prompt": "a field", "num_frames": 9, "seed": 1}'
SLOW_VIDEO = (
    b'{"prompt": "a field", "num_frames": 9, "seed": 1, "extra_params": {"steps": 10, '
    b'"step_ms": 200.0}}'
)


def test_a_full_disk_is_a_typed_error_without_leftovers(small: Served, disk: Path) -> None:
    """While the disk is full, routes that store data return 507 `storage_full`, and a running job
    fails with that code. Everything else continues to work, and the routes that store data work
    again once space is free.
    """
    with small.client() as client:
        client.send(request(FIRST, session_id="walk"))
        client.frames()
        status, snapshot, _ = call(small, "GET", "/v1/sessions/walk/snapshot")
        assert status == 200
        job = json.loads(post(small, "/v1/videos", SLOW_VIDEO)[1])["id"]
        before, log_before = files_of(disk), len(small.log)
        with full(disk):
            refused = {
                "snapshot out": call(small, "GET", "/v1/sessions/walk/snapshot"),
                "snapshot in": call(small, "PUT", "/v1/sessions/other", snapshot),
                "video": post(small, "/v1/videos", VIDEO),
            }
            assert {
                name: (status, code_of(body)) for name, (status, body, _) in refused.items()
            } == dict.fromkeys(refused, (507, "storage_full"))
            assert all(
                "retry-after" in map(str.lower, headers) for _, _, headers in refused.values()
            )

            def state() -> Any:
                return json.loads(call(small, "GET", f"/v1/videos/{job}")[1])

            wait_until(lambda: state()["status"] not in ("queued", "in_progress"))
            assert (state()["status"], state()["error"]["code"]) == ("failed", "storage_full")
            client.send(request(LATER, session_id="walk", image=None))
            client.frames()
            assert [
                call(small, "GET", path)[0] for path in ("/health", "/omni/ready", "/metrics")
            ] == [200] * 3
            assert files_of(disk) - {"filler"} == before
        status, body, _ = call(small, "GET", f"/v1/videos/{job}")
        assert (status, json.loads(body)["error"]["code"]) == (200, "storage_full")
        assert call(small, "GET", "/v1/sessions/walk/snapshot")[0] == 200
        assert call(small, "PUT", "/v1/sessions/other", snapshot)[0] == 201
        assert call(small, "DELETE", "/v1/sessions/other")[0] == 204
        made = json.loads(post(small, "/v1/videos", VIDEO)[1])["id"]
        wait_until(
            lambda: json.loads(call(small, "GET", f"/v1/videos/{made}")[1])["status"] == "completed"
        )
    assert not list(disk.rglob("*.part"))
    for recording in (disk / "records").iterdir():
        assert read_recording(recording)[2], "a recording ends with a whole record"
    assert "Traceback" not in small.log[log_before:]


def test_nothing_outlives_a_killed_server(small: Served) -> None:
    """After `kill -9` of the server process during a chunk, the engine and its worker exit within 5
    s.
    """
    Watcher(small)
    others = family(small)
    assert any("EngineCore" in " ".join(process.cmdline()) for process in others)
    assert any("Worker" in " ".join(process.cmdline()) for process in others)
    since_s = time.monotonic()
    small.process.kill()
    small.process.wait()
    print("all gone after", gone_after(others, since_s, 5))


@pytest.mark.nightly
def test_a_stopped_worker_counts_as_a_dead_engine(start: Start) -> None:
    """A worker stopped by SIGSTOP is killed after `rank_timeout_s`. Clients then get an error, and
    the server exits with status 70.
    """
    server = start(*MP)
    check_engine_death(server, named(server, "Worker"), signal.SIGSTOP, RANK_TIMEOUT_S + 1)


@pytest.mark.nightly
def test_ctrl_c_exits_with_0(start: Start) -> None:
    """After Ctrl-C, the server exits with status 0. The engine gets the signal at the same time as
    the server but is not reported as dead.
    """
    server = start(*MP)
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(seconds(30)) == 0
