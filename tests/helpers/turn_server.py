# SPDX-License-Identifier: Apache-2.0
"""Runs Debian's `coturn` as a TURN server for tests."""

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from helpers.relay import host_address
from helpers.waits import wait_until

TURN_SERVER = shutil.which("turnserver")
WHY_NOT = "no turnserver on PATH (Debian, Ubuntu: `apt install coturn`)"


@contextlib.contextmanager
def running_turn_server(folder: Path, user: str, password: str) -> Iterator[str]:
    """Run a TURN server during the block, and yield its address as HOST:PORT.

    Args:
        folder: Directory for the server's log and database.
        user: Name of the only user.
        password: The user's password.
    """
    assert TURN_SERVER is not None, WHY_NOT
    host = host_address()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    log = folder / "turn.log"
    command = [
        *(TURN_SERVER, "-n", "--lt-cred-mech", "--realm=test", f"--user={user}:{password}"),
        *(f"--listening-ip={host}", f"--relay-ip={host}", f"--listening-port={port}"),
        *("--no-tls", "--no-dtls", "--no-cli", f"--log-file={log}", "--simple-log"),
        *(f"--pidfile={folder / 'turn.pid'}", f"--userdb={folder / 'turndb'}", "--verbose"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as popen:
        try:
            wait_until(lambda: _answers(host, port))
            yield f"{host}:{port}"
        finally:
            popen.terminate()


def _answers(host: str, port: int) -> bool:
    """Return whether the server is listening. Checking TCP is sufficient, because the server
    listens on both TCP and UDP.
    """
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False
