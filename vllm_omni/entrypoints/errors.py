# SPDX-License-Identifier: Apache-2.0
"""Errors and close codes that clients of realtime endpoints can receive.

Messages come from this package or from `RequestFailed`: they are short and contain no paths,
addresses or texts of libraries. Clients should switch on `code`. `retryable` states whether the
same request may succeed later. `read_error` reads the error in a reply.
"""

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

RETRYABLE: Final = frozenset(
    {
        "session_busy",
        "session_evicted",
        "capacity",
        "draining",
        "moved",
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


class WebSocketCloseCode(IntEnum):
    """WebSocket close codes (RFC 6455, section 7.4).

    Codes from 4000 on are specific to this package.
    """

    NORMAL = 1000
    UNSUPPORTED_DATA = 1003
    POLICY = 1008
    INTERNAL = 1011
    CAPACITY = 1013
    SLOW_CONSUMER = 4008
    SUPERSEDED = 4009
    IDLE = 4010


class EndpointError(Exception):
    """A request or message was refused. The connection stays open unless `close` is set.

    Args:
        code: Stable identifier of the error.
        message: Explanation for a human reader.
        param: Field of the message that is at fault.
        close: Close code. If set, the connection is closed after the error was sent.
        details: Further keys of the error message, for example `expected`, `next_chunk_index` or
            `retry_after_ms`.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        close: WebSocketCloseCode | None = None,
        **details: Any,
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


class ClientDisconnected(Exception):
    """The peer has disconnected or the connection was closed, so no message can be sent."""


@dataclass(frozen=True)
class ReceivedError:
    """The error in a reply of a server."""

    message: str
    """Explanation for a human reader."""
    code: str | None = None
    """Stable identifier of the error. None: it has none."""
    param: str | None = None
    """Field that is at fault. None: it names none."""


def read_error(body: bytes) -> ReceivedError | None:
    """Return the error in the body of an HTTP reply.

    Returns:
        None if it has no error of this form, for example because a proxy wrote the reply.
    """
    try:
        error = json.loads(body)["error"]
        message, code, param = error["message"], error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return ReceivedError(
        str(message), None if code is None else str(code), None if param is None else str(param)
    )
