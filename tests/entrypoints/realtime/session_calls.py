# SPDX-License-Identifier: Apache-2.0
"""Functions that send requests to `/v1/sessions` and walk through the null world, for tests with
real servers.
"""

import json
import urllib.request
from typing import Any
from urllib.error import HTTPError

from helpers.fake_engine import LATER, infer
from helpers.served import AUTHORIZED, HEIGHT, WIDTH, Served
from helpers.waits import seconds


def request(num_frames: int = LATER, **fields: Any) -> dict[str, Any]:
    extra = {"height": HEIGHT, "width": WIDTH, "video_format": "ndarray_u8", "seed": 3}
    options = {"options": fields.pop("options")} if "options" in fields else {}
    return infer(num_frames, extra_body={**extra, **options}, **fields)


def signatures(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return `(first frame, latent signature)` for each chunk."""
    return [
        (int(message["video"][0, 5, 5, 0]), int(message["video"][0, 0, 0, 1]))
        for message in messages
    ]


def call(
    server: Served,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes, dict[str, str]]:
    """Send one HTTP request and return `(status, body, headers)`, even if the request is
    refused.
    """
    url = f"http://127.0.0.1:{server.port}{path}"
    sent = urllib.request.Request(url, body, headers or AUTHORIZED, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=seconds(60)) as response:
            return response.status, response.read(), dict(response.headers)
    except HTTPError as refused:
        return refused.code, refused.read(), dict(refused.headers)


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])
