# SPDX-License-Identifier: Apache-2.0
"""Errors that clients of all endpoints can receive, and how HTTP routes and WebSockets send them.

Realtime endpoints send an `EndpointError` as a message. The message's `retryable` field states
whether the same request may succeed later. HTTP routes use the `respond_to_errors` decorator, which
converts every exception to a response with OpenAI's JSON body
`{"error": {"message", "type", "param", "code"}}` and an HTTP status. Clients should switch on
`code`.

Error messages are written by this package or taken from `RequestFailed`. They are short and contain
no paths, addresses or text from other libraries.
"""

import functools
import logging
import math
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any, Concatenate, Final, ParamSpec

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from vllm_omni.outputs import RequestFailed
from vllm_omni.runtime.storage import STORAGE_FULL, is_disk_full

logger = logging.getLogger("vllm." + __name__)

P = ParamSpec("P")

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

    Codes of 4000 and above are specific to this package.
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
    """Raised when a request or message is refused. The connection stays open unless `close` is set.

    Args:
        code: Stable identifier of the error.
        message: Human-readable explanation.
        param: Message field that caused the error.
        close: WebSocket close code. If set, the connection is closed after the error has been sent.
        details: Additional keys for the error message, for example `expected`, `next_chunk_index`
            or `retry_after_ms`.
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
    """Raised when a message cannot be sent, because the peer has disconnected or the connection was
    closed.
    """


_HTTP_STATUS: Final = {
    "capacity": 503,
    "oom": 503,
    "engine_dead": 503,
    "cancelled": 503,
    "timeout": 504,
    "engine_error": 500,
    "non_finite": 500,
    "predecessor_failed": 500,
    "session_lost": 500,
    "quota_exceeded": 429,
    STORAGE_FULL: 507,
    # sessions
    "unknown_session": 404,
    "session_exists": 409,
    "session_busy": 409,
    "foreign_snapshot": 409,
    "snapshot_too_large": 413,
    "session_limit": 429,
    "snapshot_storage": 500,
    # moves between servers
    "moved": 421,
    "not_movable": 409,
    "unknown_server": 400,
    "unknown_migration": 404,
    "move_failed": 502,
    "draining": 503,
    "busy": 503,
}
"""HTTP status by error code. All other codes have status 400, because they report an invalid
request.
"""
_RETRY_AFTER_S: Final = {
    "capacity": 2,
    "oom": 5,
    "cancelled": 1,
    STORAGE_FULL: 30,
    "session_busy": 1,
    "draining": 5,
    "busy": 2,
}
DISK_FULL: Final = "the server's disk is full; try again later"


class ApiError(Exception):
    """Raised when an HTTP call is refused.

    Args:
        status: HTTP status.
        message: Human-readable explanation.
        code: Stable identifier of the error.
        param: Field that caused the error.
        retry_after_s: Time in seconds after which the client may retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def response(self) -> JSONResponse:
        body = {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }
        headers = (
            {}
            if self.retry_after_s is None
            else {"Retry-After": f"{max(1, round(self.retry_after_s))}"}
        )
        return JSONResponse(body, self.status, headers)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def not_found(message: str, param: str | None = None, code: str = "not_found") -> ApiError:
    return ApiError(404, message, code=code, param=param)


def from_failure(failure: RequestFailed | EndpointError) -> ApiError:
    """Return the HTTP error for a failure in the engine, the model or the image reader."""
    status = _HTTP_STATUS.get(failure.code, 400)
    retry_after_s: float | None = _RETRY_AFTER_S.get(failure.code)
    param = None
    if isinstance(failure, EndpointError):
        param = failure.param
        if "retry_after_ms" in failure.details:
            retry_after_s = math.ceil(failure.details["retry_after_ms"] / 1e3)
    return ApiError(
        status, failure.message, code=failure.code, param=param, retry_after_s=retry_after_s
    )


def respond_to_errors(
    route: Callable[Concatenate[Any, P], Awaitable[Response]],
) -> Callable[Concatenate[Any, P], Awaitable[Response]]:
    """Decorate a route method so that its exceptions become error replies and never reach vLLM's
    handlers.
    """

    @functools.wraps(route)
    async def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await route(self, *args, **kwargs)
        except ApiError as error:
            return error.response()
        except (RequestFailed, EndpointError) as failure:
            return from_failure(failure).response()
        except ClientDisconnect:
            return Response(status_code=499)  # the client has disconnected
        except OSError as error:
            if not is_disk_full(error):
                logger.exception("%s failed", route.__qualname__)
                return _internal_error()
            logger.warning("%s: no room on the disk", route.__qualname__)
            return ApiError(507, DISK_FULL, code=STORAGE_FULL, retry_after_s=30).response()
        except Exception:
            logger.exception("%s failed", route.__qualname__)
            return _internal_error()

    return guarded


def _internal_error() -> Response:
    return ApiError(
        500, "internal error; the server's log has details", code="internal_error"
    ).response()
