# SPDX-License-Identifier: Apache-2.0
"""Starts a real HAProxy with `deploy/haproxy/haproxy.cfg`, on free ports and with short timeouts.

If HAProxy is not installed, tests that use this module are skipped, or fail if
`OMNI_REQUIRE_HAPROXY=1` is set. `.ci/run` sets the variable where HAProxy can be installed. Debian
has an HAProxy package.
"""

import contextlib
import os
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from helpers.ports import port_for_a_server
from helpers.scripts import load_script
from helpers.waits import PATIENCE, seconds, wait_until

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
CONFIGURE = CONFIG.with_name("configure.py")
BINARY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")

needs_haproxy = pytest.mark.skipif(
    BINARY is None and os.environ.get("OMNI_REQUIRE_HAPROXY") != "1",
    reason="HAProxy is not installed",
)

CHECK_S = 0.1 * PATIENCE
CONNECT_S = 0.2 * PATIENCE
QUICK: Mapping[str, str] = {
    "inter 1s fastinter 500ms fall 3": f"inter {CHECK_S * 1e3:.0f}ms fastinter 50ms fall 5",
    "timeout connect 3s": f"timeout connect {CONNECT_S * 1e3:.0f}ms",
    "timeout check 5s": f"timeout check {10 * CHECK_S * 1e3:.0f}ms",
}
"""Edits that every test applies to the configuration to avoid waits of several seconds.

Health checks are frequent, and refused connections are retried soon. HAProxy retries after one
second or after its connect timeout, whichever is shorter. A server may fail four health checks in
a row, because on a busy machine a check can be late.
"""


class Proxy:
    """A running HAProxy.

    Args:
        folder: Directory for the configuration, the certificate and the log.
        servers: Address of each server (`host:port`), by server name.
        edits: Text replacements to apply to the configuration. It must contain each text to
            replace.
        peers: Address of each peer proxy, by proxy name. Default: only this proxy.
        name: Name of this proxy among `peers`.
    """

    def __init__(
        self,
        folder: Path,
        servers: Mapping[str, str],
        edits: Mapping[str, str] | None = None,
        peers: Mapping[str, str] | None = None,
        name: str = "proxy-1",
    ) -> None:
        assert BINARY is not None, "HAProxy is required (OMNI_REQUIRE_HAPROXY=1) and not installed"
        self.port, self.tls_port, self.statistics_port = (port_for_a_server() for _ in range(3))
        self._folder = folder / name
        self._folder.mkdir()
        self._config = self._folder / "haproxy.cfg"
        self._log = self._folder / "haproxy.log"
        own = {name: f"127.0.0.1:{port_for_a_server()}"}
        self._config.write_text(self._edited(servers, {**QUICK, **(edits or {})}, peers or own))
        replace(self._config, "localpeer proxy-1", f"localpeer {name}")
        self.process = self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def num_connections(self) -> int:
        """Return the number of client connections open at the proxy."""
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        ports = (self.port, self.tls_port)
        return sum(
            each.status == psutil.CONN_ESTABLISHED and each.laddr.port in ports
            for each in connections
        )

    def wait_until_checked(self, up: int, total: int | None = None) -> None:
        """Wait until health checks have found `up` servers with free capacity and `total` live
        servers.
        """

        def states() -> list[str]:
            rows = self.statistics()
            return [row["status"] for row in rows if row["# pxname"] == "servers"]

        def is_there() -> bool:
            found = [status for status in states() if status not in ("OPEN",)]
            with_room = sum(status.startswith("UP") for status in found[:-1])
            alive = with_room + sum(status.startswith("NOLB") for status in found[:-1])
            return with_room == up and (total is None or alive == total)

        wait_until(is_there, saying=lambda: f"servers: {states()}\n{self.log[-2000:]}")

    def wait_until_idle(self) -> None:
        """Wait until no server has a request in progress or an open WebSocket."""

        def in_use() -> int:
            rows = [row for row in self.statistics() if row["svname"] == "BACKEND"]
            return sum(int(row["scur"]) for row in rows if row["# pxname"] in ("servers", "named"))

        wait_until(lambda: in_use() == 0)

    def statistics(self) -> list[dict[str, str]]:
        """Return HAProxy's statistics table, which has a row for each frontend, backend and
        server.
        """
        text = fetch(f"http://127.0.0.1:{self.statistics_port}/;csv")
        head, *rows = (line.split(",") for line in text.splitlines() if line)
        return [dict(zip(head, row, strict=False)) for row in rows]

    def table(self, name: str) -> int:
        """Return the number of entries in a stick table."""
        shown = self.command(f"show table {name}")
        return int(re.search(r"used:(\d+)", shown)[1])  # type: ignore[index]

    def command(self, text: str) -> str:
        """Send a command to HAProxy's administration socket."""
        import socket

        with socket.socket(socket.AF_UNIX) as admin:
            admin.settimeout(seconds(10))
            admin.connect(str(self._folder / "admin.sock"))
            admin.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def client_tls(self, *protocols: str) -> ssl.SSLContext:
        """Return a TLS context that trusts this proxy and offers the given protocols."""
        context = ssl.create_default_context(cafile=str(self._folder / "certificate.pem"))
        context.set_alpn_protocols(list(protocols))
        return context

    def restart(self) -> None:
        """Kill the HAProxy process and start another."""
        self.stop()
        self.process = self._start()

    def reload(self) -> None:
        """Start another process that takes over the current process's sockets, as `systemctl
        reload` does.
        """
        old = self.process
        self.process = self._start("-sf", str(old.pid), "-x", str(self._folder / "admin.sock"))
        self._old = old

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(seconds(10))

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        assert BINARY is not None
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [BINARY, "-db", "-f", str(self._config), *arguments], stdout=log, stderr=log
            )

        def is_up() -> bool:
            assert process.poll() is None, self.log
            with contextlib.suppress(OSError):
                fetch(f"http://127.0.0.1:{self.statistics_port}/;csv")
                return True
            return False

        wait_until(is_up)
        return process

    def _edited(
        self, servers: Mapping[str, str], edits: Mapping[str, str], peers: Mapping[str, str]
    ) -> str:
        certificate = self._folder / "server.pem"
        make_certificate(certificate, self._folder / "certificate.pem")
        text = load_script(CONFIGURE).configure(CONFIG.read_text(), servers)
        for old, new in {
            "maxconn 40000": "maxconn 8000",
            "maxconn 20000": "maxconn 4000",
            "abns@vllm-omni-router": f"abns@vllm-omni-router-{self.port}",
            "bind :8000": f"bind 127.0.0.1:{self.port}",
            "bind :8443": f"bind 127.0.0.1:{self.tls_port}",
            "bind 127.0.0.1:8404": f"bind 127.0.0.1:{self.statistics_port}",
            "/etc/haproxy/server.pem": str(certificate),
            "/run/haproxy/admin.sock": f"{self._folder}/admin.sock",
            **({} if os.geteuid() == 0 else {"    user haproxy\n    group haproxy\n": ""}),
            "    peer proxy-1 127.0.0.1:10000": "\n".join(
                f"    peer {name} {address}" for name, address in peers.items()
            ),
            **edits,
        }.items():
            assert old in text, old
            text = text.replace(old, new)
        return text


@contextlib.contextmanager
def running_proxy(
    folder: Path,
    servers: Mapping[str, str],
    edits: Mapping[str, str] | None = None,
    peers: Mapping[str, str] | None = None,
    name: str = "proxy-1",
) -> Iterator[Proxy]:
    """Run a `Proxy` for the duration of the `with` block."""
    proxy = Proxy(folder, servers, edits, peers, name)
    try:
        yield proxy
    finally:
        proxy.stop()


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, old
    path.write_text(text.replace(old, new))


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=seconds(10)) as response:
        return str(response.read().decode())


def make_certificate(file: Path, public: Path) -> None:
    """Write a certificate for localhost and its key to `file`, and only the certificate to
    `public`.
    """
    key = file.with_suffix(".key")
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext {names}"
    )
    subprocess.run(
        [*command.split(), "-keyout", str(key), "-out", str(public)],
        check=True,
        capture_output=True,
    )
    file.write_text(public.read_text() + key.read_text())
