# SPDX-License-Identifier: Apache-2.0
"""Reads the errors in a server's replies, for clients of the server."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class ReceivedError:
    """The error in a reply of a server."""

    message: str
    """Explanation of the error for people."""
    code: str | None = None
    """Stable identifier of the error, or None if the reply contains no code."""
    param: str | None = None
    """Request field that caused the error, or None if the reply names no field."""


def read_error(body: bytes) -> ReceivedError | None:
    """Return the error in the body of an HTTP reply.

    Returns:
        The error. None if the body contains no error in OpenAI's format, for example because a
            proxy wrote the reply.
    """
    try:
        error = json.loads(body)["error"]
        message, code, param = error["message"], error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return ReceivedError(
        str(message), None if code is None else str(code), None if param is None else str(param)
    )
