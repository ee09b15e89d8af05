# SPDX-License-Identifier: Apache-2.0
"""Starts `vllm serve --omni` as a subprocess and connects the official OpenAI client to it."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from helpers.ports import port_for_a_server
from helpers.quick_programs import Program, start_server, stop_server, wait_until_healthy
from helpers.waits import seconds, wait_until
from openai import OpenAI

KEY = "a-key-for-tests"
HEIGHT, WIDTH = 96, 160


class Served:
    """A running server, and an official OpenAI client connected to it."""

    def __init__(self, process: Program, port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"
        self.client = self.connect()

    def connect(self, key: str = KEY) -> OpenAI:
        """Return a new client that has its own connections and raises errors instead of
        retrying.
        """
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=seconds(60))

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Bearer {KEY}", **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds(30)) as response:
                return response.status, dict(response.headers), response.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def ready(self) -> tuple[int, dict[str, Any]]:
        status, _, body = self.get("/omni/ready")
        return status, json.loads(body)

    def metric(self, line_start: str) -> float:
        """Return the value of the first `/metrics` sample whose line starts with `line_start`, or 0
        if there is none.
        """
        text = self.get("/metrics")[2].decode()
        found = re.search(rf"^{re.escape(line_start)}\S* (\S+)$", text, re.M)
        return float(found[1]) if found is not None else 0.0


def seconds_until(condition: Callable[[], bool], within: float = 30.0) -> float:
    """Wait until the condition is true, and return the waiting time in seconds."""
    started_s = time.monotonic()
    wait_until(condition, within, every_s=0.02)
    return time.monotonic() - started_s


def serve(
    model: Path,
    log: Path,
    flags: Sequence[str] = (),
    omni: dict[str, Any] | None = None,
    **environ: str,
) -> Iterator[Served]:
    port = port_for_a_server()
    config = {"omni": {"height": HEIGHT, "width": WIDTH, "max_sessions": 3, **(omni or {})}}
    arguments = ["serve", str(model), "--omni", "--enforce-eager", "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--api-key", KEY, "--served-model-name", "null"]
    arguments += ["--additional-config", json.dumps(config), *flags]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environ}
    process = start_server(arguments, log, environment)
    try:
        wait_until_healthy(process, port, log)
        yield Served(process, port, log)
    finally:
        stop_server(process)
