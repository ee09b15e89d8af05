# SPDX-License-Identifier: Apache-2.0
"""Errors and close codes that a client of any realtime door can see.

Texts are made here or by `RequestFailed`: short, fixed, without paths, addresses or a library's words. Clients switch
on `code`; `retryable` says whether the same request may succeed later.
"""

from enum import IntEnum
from typing import Any, Final

RETRYABLE: Final = frozenset(
    {
        "session_busy",
        "session_evicted",
        "capacity",
        "draining",
        "busy",
        "cancelled",
        "timeout",
        "oom",
        "resync_required",
        "slow_reader",
        "quota_exceeded",
        "predecessor_failed",
        "non_finite",
    }
)


class Close(IntEnum):
    """WebSocket close codes (RFC 6455 section 7.4; 4000 and up are ours)."""

    NORMAL = 1000
    UNSUPPORTED_DATA = 1003
    POLICY = 1008
    INTERNAL = 1011
    CAPACITY = 1013
    SLOW_CONSUMER = 4008
    SUPERSEDED = 4009
    IDLE = 4010


class DoorError(Exception):
    """One request, or one message, was refused; the connection goes on unless `close` is set.

    code: stable word. param: the field at fault. close: end the connection with this code after the error was sent.
    details: further keys of the error message (`expected`, `next_chunk_index`, `retry_after_ms`, ...).
    """

    def __init__(
        self, code: str, message: str, *, param: str | None = None, close: Close | None = None, **details: Any
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.param = param
        self.close = close
        self.details = details

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE


class ClientGone(Exception):
    """The peer left, or was closed; nobody is there to be told."""
