# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that are started as a user starts them, with `--port`."""

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_WIDTH = 12_000


def port_for_a_server() -> int:
    """Return a TCP port that is free on the loopback address, and that the kernel gives only to
    those who ask for it.

    A port that the kernel chooses may go to another process's connection before the server has
    started.
    """
    first_given = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    for port in random.SystemRandom().sample(range(first_given - _WIDTH, first_given), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError(f"none of 100 ports below {first_given} is free")
