# SPDX-License-Identifier: Apache-2.0
"""The speech routes without engines: a stand-in for the model behind them, and clients that
disconnect.
"""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from helpers.waits import pause_task, seconds
from starlette.datastructures import State
from starlette.testclient import TestClient
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.composition.speech import AudioChunk
from vllm_omni.entrypoints.speech.encode import wav_file
from vllm_omni.entrypoints.speech.plugin import SpeechEndpoints
from vllm_omni.entrypoints.speech.routes import SpeechRoutes
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "modalities": ["text", "audio"],
}


class Hummer:
    """A `SpeechModel` that returns a constant sound at 16 kHz."""

    sample_rate = 16_000

    def __init__(self) -> None:
        self.requested: list[tuple[list[int], list[int], str | None, int | None]] = []

    def check_voice(self, voice: str | None) -> None:
        if voice not in (None, "", "low"):
            raise RequestFailed("invalid_request", f"voice {voice!r} is unknown; known: low")

    def check_alive(self) -> None:
        pass

    async def read_aloud(
        self,
        prompt_ids: list[int],
        text_ids: list[int],
        request_id: str,
        *,
        voice: str | None,
        seed: int | None,
    ) -> AsyncIterator[AudioChunk]:
        self.requested.append((prompt_ids, text_ids, voice, seed))
        yield AudioChunk(torch.full([160], 0.5), self.sample_rate)


@pytest.fixture
def hummer() -> Hummer:
    return Hummer()


@pytest.fixture
def client(hummer: Hummer) -> TestClient:
    async def render(request: Any) -> tuple[None, list[dict[str, list[int]]]]:
        return None, [{"prompt_token_ids": [7, 8]}]

    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [len(text)], eos_token_id=0)
    app, routes, state = FastAPI(), SpeechRoutes(), State()
    routes.attach_to_app(app)
    state.openai_serving_chat = SimpleNamespace(
        render_chat_request=render, renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer)
    )
    model: Any = hummer
    routes.start_serving(model, state)
    return TestClient(app)


def test_any_model_that_speaks_is_served_at_its_own_sample_rate(
    client: TestClient, hummer: Hummer
) -> None:
    body = {"input": "hello", "voice": "low", "seed": 3, "response_format": "wav"}
    response = client.post("/v1/audio/speech", json=body)
    assert response.status_code == 200
    assert (
        response.content[24:28]
        == wav_file(torch.zeros(1), 16_000)[24:28]
        == (16_000).to_bytes(4, "little")
    )
    assert len(response.content) == 44 + 2 * 160
    assert hummer.requested == [([7, 8], [5, 0], "low", 3)]


def test_a_generated_seed_is_returned_in_a_header(client: TestClient, hummer: Hummer) -> None:
    """A generated seed is returned in a header, because an audio file has no field for it. The
    response to a request without a seed has no such header.
    """
    drawn = client.post(
        "/v1/audio/speech", json={"input": "hello", "seed": -1, "response_format": "wav"}
    )
    plain = client.post("/v1/audio/speech", json={"input": "hello", "response_format": "wav"})
    assert [seed for *_, seed in hummer.requested] == [int(drawn.headers["x-seed"]), None]
    assert int(drawn.headers["x-seed"]) >= 0 and "x-seed" not in plain.headers


def test_the_model_refuses_an_unknown_voice(client: TestClient, hummer: Hummer) -> None:
    response = client.post("/v1/audio/speech", json={"input": "hello", "voice": "high"})
    assert response.status_code == 400 and "known: low" in response.json()["error"]["message"]
    assert hummer.requested == []


def test_a_model_that_does_not_speak_is_refused_at_start(tmp_path: Path) -> None:
    get_family("null_world").make_tiny(tmp_path, 0, get_family("null_world").layouts[0])
    engine = AsyncLLM.__new__(AsyncLLM)
    with pytest.raises(ValueError, match=r"the family null_world of .* has no speech"):
        asyncio.run(
            SpeechEndpoints().init_state(
                engine, State(), Namespace(api_server_count=1, model=str(tmp_path))
            )
        )


def test_a_client_that_disconnects_is_logged_with_499() -> None:
    """When a client disconnects, its work is cancelled and the access log contains status 499,
    whatever the version of vLLM.
    """
    cancelled = []

    async def render_forever(request: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.messages[0]["content"])
            raise

    app, routes, state = FastAPI(), SpeechRoutes(), State()
    routes.attach_to_app(app)
    state.openai_serving_chat = SimpleNamespace(render_chat_request=render_forever)
    model: Any = SimpleNamespace(check_voice=str, check_alive=lambda: None)
    routes.start_serving(model, state)
    assert asyncio.run(post_and_leave(app, "/v1/chat/completions", CHAT)) == 499
    assert cancelled == ["hello"]


async def post_and_leave(app: FastAPI, path: str, body: dict[str, Any]) -> int:
    """Return the status of the response to a client that disconnects after its request."""
    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "query_string": b"",
        "app": app,
    }
    messages = iter(
        [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    )
    statuses = []

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await pause_task(0.05)  # wait until the handler is running
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await asyncio.wait_for(app(scope, receive, send), seconds(10))
    [status] = statuses
    return status
