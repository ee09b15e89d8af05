# SPDX-License-Identifier: Apache-2.0
"""When a server with `GracefulStop` but no engine receives SIGTERM, it finishes some requests,
refuses others, and stops within a time limit.
"""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
from helpers.ports import port_for_a_server
from helpers.waits import seconds, wait_until

SERVER = """
import asyncio, contextlib, sys
import uvicorn
from fastapi import FastAPI
from vllm_omni.entrypoints.engine.drain import GracefulStop

class Server(uvicorn.Server):  # vLLM's server installs no signal handlers of its own either
    @contextlib.contextmanager
    def capture_signals(self):
        yield

app, stop = FastAPI(), GracefulStop()

async def work():
    print("at work", flush=True)
    await asyncio.sleep(float(sys.argv[2]))
    return "done"

async def finish():
    await asyncio.sleep(float(sys.argv[3]))

app.add_api_route("/health", lambda: "fine")
app.add_api_route("/omni/ready", lambda: "ready")
app.add_api_route("/work", work, methods=["POST"])
stop.attach_to_app(app)
stop.start_handling_signals(finish, float(sys.argv[4]))
app.state.server = Server(uvicorn.Config(app, port=int(sys.argv[1]), log_level="warning"))
app.state.server.run()
"""


class Stopping:
    """A server whose requests take `work_s` and whose endpoints need `finish_s` to finish after
    SIGTERM. The time limit for stopping is `timeout_s`.
    """

    def __init__(self, work_s: float, finish_s: float, timeout_s: float) -> None:
        self.port = port_for_a_server()
        command = [
            sys.executable,
            "-c",
            SERVER,
            *map(str, (self.port, work_s, finish_s, timeout_s)),
        ]
        self.process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
        )
        wait_until(lambda: self.call("/health")[0] == 200 or self.process.poll() is not None, 60)
        assert self.process.poll() is None

    def call(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Send a request and return (status, body), or (0, "") if there is no response."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds(20)) as response:
                return response.status, response.read().decode()
        except HTTPError as refused:
            return refused.code, refused.read().decode()
        except OSError:
            return 0, ""

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@pytest.fixture
def start() -> Iterator[Callable[..., Stopping]]:
    servers: list[Stopping] = []

    def make(work_s: float = 0.0, finish_s: float = 0.0, timeout_s: float = 20.0) -> Stopping:
        servers.append(Stopping(work_s, finish_s, timeout_s))
        return servers[-1]

    yield make
    for server in servers:
        server.process.kill()
        server.process.wait()


def test_work_in_flight_is_finished_and_new_work_refused(start: Callable[..., Stopping]) -> None:
    """After SIGTERM, a running request still gets its response, probes report `draining`, and the
    server exits with status 0.
    """
    server = start(work_s=1.5)
    responses: list[tuple[int, str]] = []
    worker = threading.Thread(target=lambda: responses.append(server.call("/work", "POST")))
    worker.start()
    assert server.process.stdout is not None and server.process.stdout.readline() == b"at work\n"
    server.stop()
    wait_until(lambda: server.call("/omni/ready")[0] == 503)
    status, body = server.call("/work", "POST")
    assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
    assert server.call("/omni/ready") == (503, '{"status":"draining"}')
    assert server.call("/health")[0] == 200
    worker.join()
    assert responses == [(200, '"done"')]
    assert server.process.wait(seconds(5)) == 0


def test_the_time_is_bounded_and_a_second_signal_ends_it_at_once(
    start: Callable[..., Stopping],
) -> None:
    """Endpoints that never finish delay the exit only until `timeout_s` seconds have passed or a
    second signal arrives.
    """
    bounded = start(finish_s=60.0, timeout_s=1.0)
    impatient = start(finish_s=60.0, timeout_s=60.0)
    started_s = time.monotonic()
    bounded.stop()
    impatient.stop()
    assert bounded.process.wait(seconds(10)) == 0
    assert impatient.process.poll() is None
    impatient.stop()
    assert impatient.process.wait(seconds(20)) == 0
    assert time.monotonic() - started_s < seconds(30)
