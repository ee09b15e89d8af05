# SPDX-License-Identifier: Apache-2.0
"""Tests of how this package's own clients parse the error in a server's response."""

import json
from typing import Any

import pytest

from vllm_omni.entrypoints.errors import invalid
from vllm_omni.environments.remote import _failure
from vllm_omni.runtime.replies import ReceivedError, read_error


def test_an_error_of_this_package_is_read_completely() -> None:
    body = invalid("the size must be even", "height").response().body
    assert read_error(bytes(body)) == ReceivedError(
        "the size must be even", "invalid_value", "height"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"message": "no such model", "type": "NotFoundError", "code": 404, "param": None}, "404"),
        ({"message": "no such model", "type": "NotFoundError"}, None),
    ],
    ids=["vllm", "without a code"],
)
def test_other_errors_of_the_server_keep_their_message(error: dict[str, Any], code: Any) -> None:
    received = read_error(json.dumps({"error": error}).encode())
    assert received == ReceivedError("no such model", code, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>502 Bad Gateway</html>",
        b"\xff{}",
        b"[]",
        b"null",
        b'{"detail": "Not Found"}',
        b'{"error": "Unauthorized"}',
        b'{"error": ["message"]}',
        b'{"error": {"code": "busy"}}',
    ],
)
def test_a_reply_without_such_an_error_has_none(body: bytes) -> None:
    assert read_error(body) is None


def test_an_environment_names_the_status_of_an_error_without_a_code() -> None:
    failure = _failure(404, b'{"error": {"message": "no such model", "code": null}}')
    assert (failure.code, failure.message) == ("http_404", "no such model")
