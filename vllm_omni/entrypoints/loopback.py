# SPDX-License-Identifier: Apache-2.0
"""Connect to servers on this machine, bypassing any proxy set in the environment.

Companies and VPN clients often set a proxy variable without an exception for 127.0.0.1, and the
proxy then refuses connections to this machine. httpx, urllib and websockets read the proxy
variables; by default, aiohttp does not. The demo, the benchmarks and the examples share this
module.
"""

import ipaddress
import urllib.request
from typing import Any, Literal
from urllib.parse import urlsplit

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_loopback(url: str) -> bool:
    """Return whether a URL refers to `localhost`, a loopback address or the wildcard address."""
    name = urlsplit(url).hostname or ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return any(
        one.is_loopback or one.is_unspecified for one in (address, mapped) if one is not None
    )


def websocket_proxy(url: str) -> Literal[True] | None:
    """Return the value of the `proxy` argument of `websockets.connect` for a URL.

    Returns:
        None to connect without a proxy, or True to use the proxy from the environment.
    """
    return None if is_loopback(url) else True


def open_loopback(url: str, timeout_s: float) -> Any:
    """Open a URL on this machine without a proxy, like `urllib.request.urlopen`."""
    assert is_loopback(url), url
    return _DIRECT.open(url, timeout=timeout_s)
