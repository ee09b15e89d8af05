# SPDX-License-Identifier: Apache-2.0
"""Chooses ports for servers that tests start with `--port`, as users do."""

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_WIDTH = 12_000


def port_for_a_server() -> int:
    """Return a free TCP port on the loopback address, below the ephemeral port range.

    The kernel could assign an ephemeral port to another process before the server has bound it.
    """
    first_given = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    for port in random.SystemRandom().sample(range(first_given - _WIDTH, first_given), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError(f"none of 100 ports below {first_given} is free")
