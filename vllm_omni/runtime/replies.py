# SPDX-License-Identifier: Apache-2.0
"""Reads the errors in a server's responses on behalf of clients."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class ReceivedError:
    """The error in a response from a server."""

    message: str
    """Human-readable explanation of the error."""
    code: str | None = None
    """Stable identifier of the error, or None if the response contains no code."""
    param: str | None = None
    """Request field that caused the error, or None if the response names no field."""


def read_error(body: bytes) -> ReceivedError | None:
    """Return the error in the body of an HTTP response.

    Returns:
        The error. None if the body contains no error in OpenAI's format, for example because a
            proxy sent the response.
    """
    try:
        error = json.loads(body)["error"]
        message, code, param = error["message"], error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return ReceivedError(
        str(message), None if code is None else str(code), None if param is None else str(param)
    )
