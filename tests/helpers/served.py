# SPDX-License-Identifier: Apache-2.0
"""Start `vllm serve --omni` with an API key on the null world, for tests of every endpoint."""

import os
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
from helpers.fake_engine import Client
from helpers.ports import port_for_a_server
from helpers.quick_programs import start_server
from helpers.waits import seconds, wait_until
from websockets.sync.client import connect

KEY = "a-key-for-tests"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
START_TIMEOUT_S = 600.0
WIDTH, HEIGHT, MAX_SESSIONS = 160, 96, 3
SIZES = {"height": HEIGHT, "width": WIDTH, "max_sessions": MAX_SESSIONS}


class Served:
    """A running server.

    `client()` connects to the world camera endpoint with the API key unless arguments say
    otherwise.

    Args:
        flags: Additional arguments of `vllm serve`.
        environ: Environment variables in addition to those of this process.
        real: Start a new Python, for tests of the server's processes.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        real: bool = False,
    ) -> None:
        self.port = port_for_a_server()
        self._log = folder / f"server-{self.port}.log"
        omni = msgspec.json.encode({"omni": SIZES}).decode()
        arguments = ["serve", str(model), "--omni", "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--api-key", KEY, "--additional-config", omni, *flags]
        limits = {"VLLM_OMNI_MAX_FRAMES_PER_REQUEST": "105", "VLLM_OMNI_SLOT_WAIT_S": "1"}
        self.process = start_server(
            arguments, self._log, {**os.environ, **limits, **(environ or {})}, real=real
        )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_until_healthy(self) -> None:
        def is_up() -> bool:
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            return self.is_healthy()

        wait_until(is_up, START_TIMEOUT_S, lambda: self._log.read_text()[-3000:], every_s=0.25)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=seconds(5)
            ) as response:
                return response.status == 200
        except OSError:
            return False

    def client(self, **headers: str) -> Client:
        url = f"ws://127.0.0.1:{self.port}/v1/realtime/world/camera"
        return Client(
            connect(url, compression=None, max_size=None, additional_headers=headers or AUTHORIZED)
        )

    def running_requests(self) -> float:
        """Return the number of running requests according to vLLM's metrics."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.port}/metrics", timeout=seconds(10)
        ) as response:
            found = re.search(
                r"^vllm:num_requests_running\{.*\} (\S+)$", response.read().decode(), re.M
            )
        assert found is not None
        return float(found[1])

    def engine(self, name: str = "EngineCore") -> psutil.Process:
        """Return the engine that its log calls so; it writes one at level INFO."""
        found = re.search(rf"\({name} pid=(\d+)\)", self.log)
        assert found is not None, self.log[-3000:]
        return psutil.Process(int(found[1]))

    def stop(self) -> None:
        children = (
            psutil.Process(self.process.pid).children(recursive=True)
            if self.process.poll() is None
            else []
        )
        self.process.terminate()
        try:
            self.process.wait(seconds(20))
        except subprocess.TimeoutExpired:
            self.process.kill()
        for child in children:
            if child.is_running():
                child.kill()


def family(server: Served) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.kill()


@contextmanager
def mortal_servers(
    model: Path, folder: Path, defaults: Mapping[str, Any]
) -> Iterator[Callable[..., Served]]:
    """Yield `start("--flag", ..., **omni)`, which returns a healthy server.

    After the block the server and all its processes have ended.

    Args:
        defaults: `omni` options in addition to the size; `omni` overrides them.
    """
    with ExitStack() as stack:

        def start(*flags: str, **omni: Any) -> Served:
            config = msgspec.json.encode({"omni": {**SIZES, **defaults, **omni}}).decode()
            server = Served(model, folder, "--additional-config", config, *flags)
            stack.callback(server.stop)
            server.wait_until_healthy()
            stack.callback(kill_all, family(server))
            return server

        yield start
