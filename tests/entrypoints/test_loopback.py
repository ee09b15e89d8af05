# SPDX-License-Identifier: Apache-2.0
"""Clients use the proxy set in the environment for servers on other machines, but not for servers
on the same machine.
"""

import ast
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from vllm_omni.entrypoints.cli import demo
from vllm_omni.entrypoints.loopback import is_loopback, websocket_proxy

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("ws://127.0.0.1:8000", True),
        ("ws://127.8.9.1", True),
        ("http://localhost:8000/x", True),
        ("http://world.localhost", True),
        ("ws://[::1]:8000", True),
        ("ws://[::ffff:127.0.0.1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("wss://worlds.example", False),
        ("ws://192.168.0.7:8000", False),
        ("ws://localhost.example", False),
    ],
)
def test_addresses_of_this_machine(url: str, here: bool) -> None:
    assert is_loopback(url) is here
    assert websocket_proxy(url) is (None if here else True)


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_the_demo_finds_its_server_in_spite_of_a_proxy(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo contacts its server directly even if a proxy is set in the environment. Through the
    proxy, the demo would wait ten minutes for the server.
    """
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert demo.is_healthy(f"http://127.0.0.1:{port}/health")


def calls(path: Path) -> Iterator[tuple[str, set[str | None]]]:
    """Yield the function name and the keyword argument names of each call in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg for keyword in node.keywords}


@pytest.mark.parametrize("folder", ["vllm_omni", "examples", "benchmarks", "scripts"])
def test_every_client_sets_its_use_of_a_proxy(folder: str) -> None:
    """Every client states explicitly whether it uses a proxy, because `urlopen` and httpx would
    otherwise take the proxy from the environment. The test counts any `connect` call with a
    `max_size` argument as a WebSocket client.
    """
    files = [*(REPO / folder).rglob("*.py")]
    assert files
    for path in files:
        for name, keywords in calls(path):
            assert not name.endswith("urlopen"), path
            assert name not in ("httpx.Client", "httpx.AsyncClient") or "trust_env" in keywords, (
                path
            )
            assert name != "connect" or "max_size" not in keywords or "proxy" in keywords, path
