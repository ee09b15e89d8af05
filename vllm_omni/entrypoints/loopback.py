# SPDX-License-Identifier: Apache-2.0
"""Clients of servers on this machine: they never use the proxy that the environment names.

A proxy variable without an exception, as companies and VPN clients set it, would send a connection to 127.0.0.1 to the
proxy, which refuses it. httpx, urllib and websockets all read these variables; aiohttp does not unless it is told to.
Shared by the demo, the benchmarks and the examples. Held by tests/entrypoints/test_loopback.py.
"""

import ipaddress
import urllib.request
from typing import Any, Literal
from urllib.parse import urlsplit

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine: `localhost`, a loopback address, or the wildcard address."""
    name = urlsplit(url).hostname or ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return any(one.is_loopback or one.is_unspecified for one in (address, mapped) if one is not None)


def websocket_proxy(url: str) -> Literal[True] | None:
    """The argument `proxy` of `websockets.connect`: None is no proxy, True the environment's."""
    return None if is_loopback(url) else True


def open_loopback(url: str, timeout_s: float) -> Any:
    """`urllib.request.urlopen` of a URL of this machine, without a proxy."""
    assert is_loopback(url), url
    return _DIRECT.open(url, timeout=timeout_s)
