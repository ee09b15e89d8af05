# SPDX-License-Identifier: Apache-2.0
"""The speech routes without engines: what a client that leaves does to its request."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from helpers.waits import pause_task, seconds
from starlette.datastructures import State

from vllm_omni.entrypoints.speech.routes import SpeechRoutes
from vllm_omni.model_executor.models.qwen2_5_omni.options import SpeechDefaults

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "modalities": ["text", "audio"]}


def test_a_client_that_left_is_not_answered_with_success() -> None:
    """499 for the access log, whatever this version of vLLM makes of it; the work for it is cancelled."""
    cancelled = []

    async def render_forever(request: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.messages[0]["content"])
            raise

    app, routes, state = FastAPI(), SpeechRoutes(), State()
    routes.attach(app)
    state.openai_serving_chat = SimpleNamespace(render_chat_request=render_forever)
    composition: Any = SimpleNamespace(
        defaults=SpeechDefaults(), builder=SimpleNamespace(check_voice=str), check_alive=lambda: None
    )
    routes.start(composition, state)
    assert asyncio.run(post_and_leave(app, "/v1/chat/completions", CHAT)) == 499
    assert cancelled == ["hello"]


async def post_and_leave(app: FastAPI, path: str, body: dict[str, Any]) -> int:
    """The status of the answer to a client that closes the connection once it has sent everything."""
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "app": app}
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])
    statuses = []

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await pause_task(0.05)  # the handler is at work by then
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await asyncio.wait_for(app(scope, receive, send), seconds(10))
    [status] = statuses
    return status
