# SPDX-License-Identifier: Apache-2.0
"""Two or more real servers, for tests that move sessions between servers."""

import json
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from helpers.fake_engine import Client
from helpers.ports import port_for_a_server
from helpers.served import SIZES, Served
from helpers.waits import seconds, wait_until

OPERATOR_KEY = "operator-key-for-tests"
OPERATOR = {"Authorization": f"Bearer {OPERATOR_KEY}"}


class TestFleet:
    """Servers that can be started by name. They all read one file, which lists all servers.

    Args:
        model: Checkpoint directory.
        folder: Directory for logs and for the file that lists the servers.
        names: Names of the servers.
        started: Names of the servers to start immediately. Default: all.
        omni: `omni` options for all servers, in addition to the defaults.
        shared_dir: Directory that all servers share. Default: none.
        flags: Function that receives the servers' ports and returns additional arguments for all
            servers.
    """

    __test__ = False

    def __init__(
        self,
        model: Path,
        folder: Path,
        names: str = "ab",
        started: str | None = None,
        omni: Mapping[str, Any] | None = None,
        shared_dir: Path | None = None,
        flags: Callable[[dict[str, int]], tuple[str, ...]] = lambda ports: (),
    ) -> None:
        self._flags = flags
        self._model, self._folder, self._omni = model, folder, dict(omni or {})
        self.ports = {name: port_for_a_server() for name in names}
        self.file = folder / "fleet.toml"
        shared = "" if shared_dir is None else f'shared_dir = "{shared_dir}"\n'
        # The server `gone` is listed but never started.
        ports = {**self.ports, "gone": port_for_a_server()}
        self.file.write_text(
            "".join(
                f'[servers.{name}]\nurl = "http://127.0.0.1:{port}"\n'
                f'public_url = "http://127.0.0.1:{port}"\n{shared}'
                for name, port in ports.items()
            )
        )
        self.servers: dict[str, Served] = {}
        for name in names if started is None else started:
            self.start(name)
        for server in self.servers.values():
            server.wait_until_healthy()

    def start(self, name: str, **omni: Any) -> Served:
        """Start a server without waiting until it is healthy."""
        options = {**SIZES, "max_sessions": 8, "fleet": str(self.file), "server_name": name}
        config = json.dumps({"omni": {**options, **self._omni, **omni}})
        self.servers[name] = Served(
            self._model,
            self._folder,
            "--additional-config",
            config,
            *self._flags(self.ports),
            environ={"VLLM_OMNI_OPERATOR_KEY": OPERATOR_KEY, "VLLM_LOGGING_LEVEL": "INFO"},
            port=self.ports[name],
        )
        return self.servers[name]

    def __getitem__(self, name: str) -> Served:
        return self.servers[name]

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


def migrate(
    server: Served, session_id: str, to: str, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Move a session to another server, and return the response's status and body."""
    body = json.dumps({"to": to}).encode()
    sent = {"Content-Type": "application/json", **(OPERATOR if headers is None else headers)}
    return _call(server, f"/omni/sessions/{session_id}/migrate", sent, body)


def _call(
    server: Served, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[int, dict[str, Any]]:
    sent = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", body, headers)
    try:
        with urllib.request.urlopen(sent, timeout=seconds(60)) as response:
            return response.status, json.load(response)
    except HTTPError as refused:
        return refused.code, json.load(refused)


def live_sessions(server: Served) -> set[str]:
    """Return the names of the sessions that a server's clients can use."""
    status, reply = _call(server, "/omni/sessions", OPERATOR)
    assert status == 200, reply
    return {session["name"] for session in reply["sessions"]}


def engine_sessions(server: Served) -> int:
    """Return the number of sessions in a server's engine. Sessions that are being moved are
    included.
    """
    number = _call(server, "/omni/ready", {})[1]["sessions"]
    assert isinstance(number, int)
    return number


def wait_for_engine_sessions(server: Served, number: int) -> None:
    wait_until(lambda: engine_sessions(server) == number)


def end_session(client: Client, session_id: str) -> None:
    client.request({"endpoint": "close", "session_id": session_id})
