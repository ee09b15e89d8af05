# SPDX-License-Identifier: Apache-2.0
"""Errors in replies of a server, as its clients read them."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class ReceivedError:
    """The error in a reply of a server."""

    message: str
    """Explanation for a human reader."""
    code: str | None = None
    """Stable identifier of the error. None: the reply has no code."""
    param: str | None = None
    """Field that caused the error. None: the reply names no field."""


def read_error(body: bytes) -> ReceivedError | None:
    """Return the error in the body of an HTTP reply.

    Returns:
        None if the body has no error of OpenAI's form, for example because a proxy wrote the reply.
    """
    try:
        error = json.loads(body)["error"]
        message, code, param = error["message"], error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return ReceivedError(
        str(message), None if code is None else str(code), None if param is None else str(param)
    )
