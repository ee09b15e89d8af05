# SPDX-License-Identifier: Apache-2.0
"""`SpectatorTokens`: issues random tokens, each of which admits spectators to one session until it
expires.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.sessions.session_host import SessionKey

MAX_TOKENS: Final = 4096
"""Maximum number of tokens per process. Each additional token replaces the oldest token."""
MAX_TOKEN_CHARS: Final = 128


class _Grant(NamedTuple):
    key: SessionKey
    expires_s: float


class SpectatorTokens:
    """Tokens of one API server process. Only the tokens' digests are stored.

    Args:
        clock: Function that returns a monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._grants: OrderedDict[bytes, _Grant] = OrderedDict()

    def issue(self, key: SessionKey, lifetime_s: float) -> str:
        """Return a new token for a session."""
        token = secrets.token_urlsafe(24)
        self._grants[_digest(token)] = _Grant(key, self._clock() + lifetime_s)
        while len(self._grants) > MAX_TOKENS:
            self._grants.popitem(last=False)
        return token

    def session_of(self, token: str) -> SessionKey:
        """Return the `SessionKey` of the session that a token grants access to.

        Raises:
            EndpointError: `invalid_token` if the token is unknown or has expired.
        """
        digest = _digest(token[: MAX_TOKEN_CHARS + 1])
        grant = self._grants.get(digest)
        if grant is not None and grant.expires_s > self._clock():
            return grant.key
        self._grants.pop(digest, None)
        raise EndpointError(
            "invalid_token",
            "the token is unknown or has expired; ask the session's owner for another",
            param="token",
            close=WebSocketCloseCode.POLICY,
        )


def _digest(token: str) -> bytes:
    return hashlib.blake2b(token.encode("utf-8", "surrogateescape"), digest_size=16).digest()
