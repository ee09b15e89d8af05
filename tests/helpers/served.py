# SPDX-License-Identifier: Apache-2.0
"""Starts `vllm serve --omni` with an API key, by default on the null world, for tests of all
endpoints.
"""

import os
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
from helpers.fake_engine import Client
from helpers.ports import port_for_a_server
from helpers.quick_programs import (
    is_healthy,
    kill_all,
    start_server,
    stop_server,
    wait_until_healthy,
)
from helpers.waits import seconds
from websockets.sync.client import connect

KEY = "a-key-for-tests"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
WIDTH, HEIGHT, MAX_SESSIONS = 160, 96, 3
SIZES = {"height": HEIGHT, "width": WIDTH, "max_sessions": MAX_SESSIONS}


class Served:
    """A running server.

    By default, `client()` connects to the world camera endpoint with the API key.

    Args:
        flags: Additional arguments for `vllm serve`.
        environ: Environment variables in addition to those of this process.
        real: Whether to start a new Python process, for tests of the server's processes.
        port: Server port. Default: a free port.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        real: bool = False,
        port: int | None = None,
    ) -> None:
        self.port = port or port_for_a_server()
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
        wait_until_healthy(self.process, self.port, self._log)

    def is_healthy(self) -> bool:
        return is_healthy(self.port)

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
        """Return the engine process that the server's log calls `name`. The server logs the
        process's id at INFO level.
        """
        found = re.search(rf"\({name} pid=(\d+)\)", self.log)
        assert found is not None, self.log[-3000:]
        return psutil.Process(int(found[1]))

    def stop(self) -> None:
        stop_server(self.process)


def family(server: Served) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


@contextmanager
def mortal_servers(
    model: Path, folder: Path, defaults: Mapping[str, Any]
) -> Iterator[Callable[..., Served]]:
    """Yield `start(*flags, **omni)`, which starts a server and returns it once it is healthy.

    At the end of the block, the servers and all their processes are stopped.

    Args:
        defaults: `omni` options in addition to the frame size. The `omni` keyword arguments of
            `start` override them.
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
