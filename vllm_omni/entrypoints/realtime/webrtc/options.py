# SPDX-License-Identifier: Apache-2.0
"""`WebRtcOptions`: settings for the WebRTC endpoint, read once from environment variables."""

from typing import Annotated, Final
from urllib.parse import unquote, urlsplit

import msgspec

_SCHEMES: Final = ("stun", "turn", "turns")


class IceServer(msgspec.Struct, frozen=True):
    """A STUN or TURN server."""

    url: str
    """Server URL, for example `turn:turn.example:3478?transport=tcp`."""
    username: str | None = None
    """User name for a TURN server."""
    credential: str | None = None
    """Password for a TURN server."""


class WebRtcOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the WebRTC endpoint in one API server process."""

    ice_servers: str = ""
    """STUN and TURN servers, separated by commas: `stun:HOST:PORT`, `turn:USER:PASSWORD@HOST:PORT`.
    Default: none, which is sufficient if clients can reach the server's UDP ports.
    """
    webrtc_connect_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 20.0
    """Time in seconds within which a client must connect after the server has answered its offer.
    Default: 20.
    """

    def servers(self) -> list[IceServer]:
        """Parse and return the STUN and TURN servers.

        Raises:
            ValueError: An entry is neither a valid STUN server nor a valid TURN server. The error
                message does not contain the password.
        """
        return [_server(entry.strip()) for entry in self.ice_servers.split(",") if entry.strip()]


def _server(entry: str) -> IceServer:
    scheme, _, rest = entry.partition(":")
    if scheme not in _SCHEMES or not rest:
        raise ValueError(
            "VLLM_OMNI_ICE_SERVERS: an entry must look like stun:HOST:PORT or "
            "turn:USER:PASSWORD@HOST:PORT"
        )
    parts = urlsplit(f"//{rest}")
    if not parts.hostname:
        raise ValueError(f"VLLM_OMNI_ICE_SERVERS: an entry of {scheme} has no host")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = host if parts.port is None else f"{host}:{parts.port}"
    query = f"?{parts.query}" if parts.query else ""
    return IceServer(
        f"{scheme}:{address}{query}",
        None if parts.username is None else unquote(parts.username),
        None if parts.password is None else unquote(parts.password),
    )
