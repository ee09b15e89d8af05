# SPDX-License-Identifier: Apache-2.0
"""Tickets: credentials that browsers use to open WebSockets, because a browser cannot set headers
on a WebSocket.

A ticket represents one API key and one `Origin`, expires within seconds and can be used only once.
Tickets are signed and not stored, so every API server process with the same secret accepts them.
Only the process that accepted a ticket's first use refuses a second use.

JSON Web Tokens and itsdangerous are not used, because neither refuses a second use of a token. The
rest of the scheme needs only one HMAC from the standard library.
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
"""Environment variable that holds the secret. `vllm serve --omni` sets it to a random value, so all
its API server processes share the secret.
"""

TTL_S: Final = 30
MAX_REMEMBERED: Final = 65_536

_HEAD: Final = struct.Struct(">BIH12s")  # version, expiry (Unix seconds), key index, nonce
_VERSION: Final = 1
_MAC_BYTES: Final = 16


class TicketError(Exception):
    """Raised when a ticket is refused. The message is written to the server's log but not sent to
    the client.
    """


def derive_secret(keys: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Return the secret that signs tickets.

    All processes with the same keys and environment derive the same secret. If `SECRET_VARIABLE` is
    not set (plain `vllm serve`), the secret is derived from the keys with scrypt. Because scrypt is
    slow, an attacker cannot use a ticket to test guessed keys quickly.
    """
    joined = b"\0".join(
        hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys
    )
    if shared := environ.get(SECRET_VARIABLE):
        return hmac.digest(shared.encode("utf-8", "surrogateescape"), joined, "sha256")
    return hashlib.scrypt(joined, salt=b"vllm_omni tickets", n=1 << 14, r=8, p=1, dklen=32)


class TicketOffice:
    """Issues and accepts tickets in one process.

    Args:
        secret: Secret that signs the tickets.
        num_keys: Number of API keys.
        ttl_s: Lifetime of a ticket in seconds.
        max_remembered: Maximum number of used tickets to record. If more tickets are used within
            `ttl_s`, the excess tickets are refused.
        now: Function that returns the Unix time.
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
        # (time at which the nonce may be removed, nonce)
        self._order: deque[tuple[float, bytes]] = deque()

    def issue(self, key_index: int, origin: str | None) -> str:
        """Return a new ticket of 47 URL-safe characters.

        Args:
            key_index: Index of the API key.
            origin: Origin of the page that requests the ticket. None: the request did not come from
                a page.
        """
        head = _HEAD.pack(
            _VERSION, int(self._now()) + self.ttl_s, key_index, secrets.token_bytes(12)
        )
        return base64.urlsafe_b64encode(head + self._mac(head, origin)).rstrip(b"=").decode()

    def redeem_ticket(self, ticket: str, origin: str | None) -> int:
        """Redeem a ticket and return the index of its API key.

        Raises:
            TicketError: The ticket is invalid, has expired or has already been used.
        """
        try:
            data = base64.b64decode(
                ticket + "=" * (-len(ticket) % 4), altchars=b"-_", validate=True
            )
        except (binascii.Error, ValueError):
            raise TicketError("not base64") from None
        head, mac = data[: _HEAD.size], data[_HEAD.size :]
        if len(head) != _HEAD.size or not hmac.compare_digest(mac, self._mac(head, origin)):
            raise TicketError("signature or origin differs")
        version, expiry, key_index, nonce = _HEAD.unpack(head)
        now = self._now()
        if version != _VERSION or key_index >= self._num_keys:
            raise TicketError("issued by another server")
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
