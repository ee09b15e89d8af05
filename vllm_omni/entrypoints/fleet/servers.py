# SPDX-License-Identifier: Apache-2.0
"""`Fleet`: the servers between which sessions may move, and their operator's key.

The servers are listed in a TOML file (`omni.fleet`), which may be the same on all servers:

    [servers.a]
    url = "http://10.0.0.1:8000"

    [servers.b]
    url = "http://10.0.0.2:8000"
    public_url = "https://b.example.com"

`url` must address the server process directly, without a proxy in between, because a refused
connection is taken as proof that the process has ended. The operator's key is read from the
environment so that it does not appear in logs.
"""

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from vllm_omni.config import SERVER_NAME

KEY_VARIABLE: Final = "VLLM_OMNI_OPERATOR_KEY"
_LEAST_KEY_CHARS: Final = 16

ServerName = Annotated[str, msgspec.Meta(pattern=SERVER_NAME)]
_Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?\Z", max_length=1024)]


class FleetServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server's entry in the fleet file."""

    url: _Url
    """URL at which the other servers reach this server."""
    public_url: _Url | None = None
    """URL at which clients reach this server. Default: clients keep using their current address,
    where a proxy selects the server by its name.
    """
    shared_dir: str | None = None
    """Directory shared by all servers that specify the same value, for example in their host's
    in-memory file system. Sessions move between these servers through the directory, and most of a
    session is copied while it is active. Default: snapshots are sent over the network.
    """


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of the fleet file."""

    servers: dict[ServerName, FleetServer]
    """Servers by name."""

    @classmethod
    def read_file(cls, path: Path) -> "FleetFile":
        """Read and check the fleet file.

        Raises:
            ValueError: The file cannot be read or is invalid. The message names the file.
        """
        try:
            return msgspec.toml.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ValueError(f"omni.fleet {path}: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"omni.fleet {path}: {error}") from error


@dataclass(frozen=True)
class Fleet:
    """The other servers of a fleet, as seen by one server."""

    key: str | None
    """The operator's key. None: the operator routes are disabled."""
    others: Mapping[str, FleetServer]
    """The other servers by name."""
    shared_dir: str | None = None
    """Value of `FleetServer.shared_dir` for this server. None: snapshots are sent over the network.
    """

    @classmethod
    def read(
        cls, path: str | None, own_name: str | None, environ: Mapping[str, str] | None = None
    ) -> "Fleet":
        """Read the fleet file and the operator's key.

        Args:
            path: Value of `omni.fleet`.
            own_name: Value of `omni.server_name`.
            environ: Environment variables. Default: those of this process.

        Raises:
            ValueError: The fleet file or the operator's key is invalid, or the key is missing.
        """
        key = (os.environ if environ is None else environ).get(KEY_VARIABLE) or None
        if key is not None and (len(key) < _LEAST_KEY_CHARS or not key.isascii()):
            raise ValueError(
                f"{KEY_VARIABLE} must have at least {_LEAST_KEY_CHARS} ASCII characters, got "
                f"{len(key)}"
            )
        if path is None:
            return cls(key, {})
        if key is None:
            raise ValueError(
                f"omni.fleet requires the variable {KEY_VARIABLE}, the same everywhere"
            )
        servers = FleetFile.read_file(Path(path)).servers
        if own_name not in servers:
            raise ValueError(
                f"omni.fleet {path} lists {sorted(servers)}, but not this server: omni.server_name "
                f"is {own_name!r}"
            )
        others = {name: server for name, server in servers.items() if name != own_name}
        return cls(key, others, servers[own_name].shared_dir)

    def is_operator(self, authorization: str) -> bool:
        """Return whether an `Authorization` header contains the key. The comparison takes constant
        time.
        """
        scheme, _, token = authorization.partition(" ")
        known = (self.key or "").encode()
        is_equal = hmac.compare_digest(token.encode("utf-8", "surrogateescape"), known)
        return self.key is not None and scheme.lower() == "bearer" and is_equal

    def find(self, name_or_url: str) -> tuple[str, FleetServer] | None:
        """Find another server by its name or address. Return None if it is not listed."""
        for name, server in self.others.items():
            if name_or_url == name or name_or_url.rstrip("/") == server.url.rstrip("/"):
                return name, server
        return None
