# SPDX-License-Identifier: Apache-2.0
"""Tickets: a browser's credential instead of an API key when it opens a WebSocket, whose headers it cannot set.

A ticket stands for one of the server's API keys and one `Origin`, lives for seconds and is used once. It is signed, not
stored, so every API server process with the same secret takes every ticket; that a ticket was used is known to the
process that took it. Knows no sockets and no routes.
Why not JSON Web Tokens or itsdangerous: neither refuses a second use, and the rest is one HMAC of
the standard library.
Held by tests/entrypoints/test_tickets.py.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

SECRET_VARIABLE: Final = "VLLM_OMNI_TICKET_SECRET"
"""Set by `vllm serve --omni` to fresh random text, so that its API server processes share a secret."""

TTL_S: Final = 30
MAX_REMEMBERED: Final = 65_536

_HEAD: Final = struct.Struct(">BIH12s")  # version, expiry (Unix seconds), number of the key, nonce
_VERSION: Final = 1
_MAC_BYTES: Final = 16


class TicketError(Exception):
    """A ticket was refused. The text is for the server's log: a client is told only that it was."""


def derive_secret(keys: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Return the key that signs the tickets of every process that was started with these keys and this environment.

    Without the variable (plain `vllm serve`) it comes from the keys alone, slowly (scrypt), so that a ticket seen on
    the wire is no quick test of a guessed key.
    """
    joined = b"\0".join(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys)
    if shared := environ.get(SECRET_VARIABLE):
        return hmac.digest(shared.encode("utf-8", "surrogateescape"), joined, "sha256")
    return hashlib.scrypt(joined, salt=b"vllm_omni tickets", n=1 << 14, r=8, p=1, dklen=32)


class TicketOffice:
    """Issues and takes tickets in one process.

    ttl_s: how long a ticket is good for. max_remembered: used tickets kept in mind; when so many were used within
    `ttl_s`, further ones are refused. now: Unix time.
    """

    def __init__(
        self,
        secret: bytes,
        num_keys: int,
        *,
        ttl_s: int = TTL_S,
        max_remembered: int = MAX_REMEMBERED,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.ttl_s = ttl_s
        self._secret = secret
        self._num_keys = num_keys
        self._max_remembered = max_remembered
        self._now = now
        self._used: set[bytes] = set()
        self._order: deque[tuple[float, bytes]] = deque()  # (when it may be forgotten, nonce)

    def issue(self, key_index: int, origin: str | None) -> str:
        """Return a new ticket: URL-safe text of 47 characters. origin: of the page it is for; None = no page."""
        head = _HEAD.pack(_VERSION, int(self._now()) + self.ttl_s, key_index, secrets.token_bytes(12))
        return base64.urlsafe_b64encode(head + self._mac(head, origin)).rstrip(b"=").decode()

    def take(self, ticket: str, origin: str | None) -> int:
        """Use a ticket up and return the number of the key it stands for. Raises `TicketError`."""
        try:
            data = base64.b64decode(ticket + "=" * (-len(ticket) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise TicketError("not base64") from None
        head, mac = data[: _HEAD.size], data[_HEAD.size :]
        if len(head) != _HEAD.size or not hmac.compare_digest(mac, self._mac(head, origin)):
            raise TicketError("signature or origin differs")
        version, expiry, key_index, nonce = _HEAD.unpack(head)
        now = self._now()
        if version != _VERSION or key_index >= self._num_keys:
            raise TicketError("made by another server")
        if not now < expiry <= now + self.ttl_s + 1:
            raise TicketError("expired")
        self._remember(nonce, now)
        return int(key_index)

    def _remember(self, nonce: bytes, now: float) -> None:
        while self._order and self._order[0][0] < now:
            self._used.discard(self._order.popleft()[1])
        if nonce in self._used:
            raise TicketError("used before")
        if len(self._used) >= self._max_remembered:
            raise TicketError("too many tickets at once")
        self._used.add(nonce)
        self._order.append((now + self.ttl_s + 1, nonce))

    def _mac(self, head: bytes, origin: str | None) -> bytes:
        text = b"-" if origin is None else b"+" + origin.encode("utf-8", "surrogateescape")
        return hmac.digest(self._secret, head + text, "sha256")[:_MAC_BYTES]
