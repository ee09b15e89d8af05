# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` for models that read pictures and clips on the diffusion worker: one question, one answer.

A call is a user message with text and one `image_url` or `video_url` (`data:` URLs), an optional system message before
it. An answer is one engine request; a streamed one is a session, one request for each few tokens, so that a slow reader
holds up nobody and a client that leaves costs the piece in flight. Which model reads what is `Capabilities.reads`.
Models that generate text through stock vLLM are served by vLLM's own route of this name.
Held by tests/entrypoints/openai/test_openai_chat.py.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from starlette.responses import Response

from vllm_omni.entrypoints.engine import OmniEngine
from vllm_omni.entrypoints.openai.body import read_body
from vllm_omni.entrypoints.openai.clips import read_clip
from vllm_omni.entrypoints.openai.errors import answer_errors, from_failure, invalid, not_found
from vllm_omni.entrypoints.openai.leaving import until_disconnected
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.pictures import read_upload
from vllm_omni.entrypoints.openai.protocol import MAX_PROMPT_CHARS, MAX_SEED, read_request
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.realtime.limits import DoorLimits
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

_PIECE_TOKENS: Final = 8
_MAX_MESSAGES: Final = 2

Text = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class DataUrl(_Strict):
    url: str = Field(description="A `data:` URL; this server fetches nothing.")
    detail: Literal["auto", "low", "high"] | None = Field(None, description="Accepted, not used.")


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: DataUrl


class VideoPart(_Strict):
    type: Literal["video_url"]
    video_url: DataUrl


class Message(_Strict):
    role: Literal["system", "developer", "user"]
    content: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]], Tag("parts")],
        Discriminator(lambda content: "parts" if isinstance(content, list) else "text"),
    ]


class StreamOptions(_Strict):
    include_usage: bool = False


class ChatRequest(_Strict):
    messages: list[Message] = Field(min_length=1, max_length=_MAX_MESSAGES)
    model: str | None = Field(None, max_length=1024)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, description="0 (greedy) if absent.")
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    n: Literal[1] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1024, description="Accepted, not used.")
    safety_identifier: str | None = Field(None, max_length=1024, description="Accepted, not used.")
    extra_params: dict[str, Any] | None = Field(None, description="Extension. Options of the served model itself.")


@dataclass(frozen=True)
class _Call:
    """One call: what is asked, and the picture or clip it is about."""

    request: ChatRequest
    model: str
    prompt: str
    seed: int
    options: dict[str, Any]
    arrays: dict[str, np.ndarray]
    id: str
    created: int


class ChatRoutes:
    """The chat route of one API server process."""

    def __init__(
        self, engine: OmniEngine, served: ServedModel, limits: MediaLimits, door_limits: DoorLimits, executor: Executor
    ) -> None:
        self._engine, self._served = engine, served
        self._limits, self._door_limits, self._executor = limits, door_limits, executor

    @answer_errors
    async def completions(self, request: Request) -> Response:
        reads = self._served.capabilities.reads
        if not reads:
            raise invalid(f"{self._served.names[0]} does not answer in text", code="unsupported_by_model")
        body = await read_body(request, self._limits.max_body_bytes)
        call = await self._read(read_request(ChatRequest, body.fields))
        kind = next(iter(call.arrays))
        if kind not in reads:
            raise invalid(f"{call.model} reads {' and '.join(reads)}, not {kind}", "messages", "unsupported_by_model")
        if call.request.stream:
            return StreamingResponse(self._events(call), media_type="text/event-stream")
        return JSONResponse(await until_disconnected(request, self._whole(call)))

    # -- the question --------------------------------------------------------------------------------------------------

    async def _read(self, asked: ChatRequest) -> _Call:
        """Check the messages and decode the picture or clip, off the event loop. Raises `ApiError` 400."""
        if asked.model is not None and asked.model not in self._served.names:
            raise not_found(
                f"The model {asked.model[:100]!r} does not exist; served: {', '.join(self._served.names)}",
                "model",
                "model_not_found",
            )
        *before, question = asked.messages
        if question.role != "user" or any(message.role == "user" for message in before):
            raise invalid("messages must be one user message, with at most one system message before it", "messages")
        parts = (
            [TextPart(type="text", text=question.content)] if isinstance(question.content, str) else question.content
        )
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        seen = [part for part in parts if not isinstance(part, TextPart)]
        if len(seen) != 1:
            raise invalid(f"the user message must hold one image_url or video_url, got {len(seen)}", "messages.content")
        if not texts:
            raise invalid("the user message must hold a text part: ask something", "messages.content")
        loop = asyncio.get_running_loop()
        (part,) = seen
        if isinstance(part, ImagePart):
            url = _inline(part.image_url.url)
            arrays = {
                "image": await loop.run_in_executor(self._executor, read_upload, url, "messages", self._door_limits)
            }
        else:
            url, rate = _inline(part.video_url.url), self._served.capabilities.fps
            most = self._served.capabilities.read_frames
            clip = await loop.run_in_executor(self._executor, read_clip, url, rate, most, "messages.content")
            arrays = {"video": clip}
        options: dict[str, Any] = {**(asked.extra_params or {}), "modalities": ["text"]}
        if before:
            options["system_prompt"] = _system_text(before[0])
        limit = asked.max_completion_tokens or asked.max_tokens
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        chosen = {"max_tokens": limit, "temperature": asked.temperature, "top_p": asked.top_p, "stop": stop}
        options |= {name: value for name, value in chosen.items() if value is not None}
        return _Call(
            request=asked,
            model=asked.model or self._served.names[0],
            prompt="\n".join(texts),
            seed=secrets.randbelow(2**31) if asked.seed is None else asked.seed,
            options=options,
            arrays=arrays,
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
        )

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def _whole(self, call: _Call) -> dict[str, Any]:
        params = DiffusionParams(
            session_id=call.id, one_shot=True, prompt=call.prompt, seed=call.seed, options=call.options
        )
        meta = await self._run(params, call.arrays)
        message = {"role": "assistant", "content": meta["text"], "refusal": None}
        return {
            "id": call.id,
            "object": "chat.completion",
            "created": call.created,
            "model": call.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": meta["finish_reason"]}],
            "usage": _usage(meta),
        }

    async def _events(self, call: _Call) -> AsyncGenerator[bytes]:
        """Server-sent events, one for each piece of the answer. The session ends with the stream, however it ends."""
        arrays = call.arrays
        params = DiffusionParams(
            session_id=call.id,
            prompt=call.prompt,
            seed=call.seed,
            options={**call.options, "chunk_tokens": _PIECE_TOKENS},
        )
        try:
            yield _chunk(call, {"role": "assistant", "content": ""})
            while True:
                meta = await self._run(params, arrays)
                if meta["text"]:
                    yield _chunk(call, {"content": meta["text"]})
                if meta["finish_reason"] is not None:
                    break
                params, arrays = DiffusionParams(session_id=call.id), {}
            yield _chunk(call, {}, meta["finish_reason"])
            if call.request.stream_options is not None and call.request.stream_options.include_usage:
                yield _event({**_head(call), "choices": [], "usage": _usage(meta)})
            yield b"data: [DONE]\n\n"
        except RequestFailed as failure:
            yield _event(msgspec.json.decode(bytes(from_failure(failure).response().body)))
        finally:
            await asyncio.shield(self._close(call.id))

    async def _run(self, params: DiffusionParams, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        meta, _ = await self._engine.run_when_room(
            params, arrays, timeout_s=self._limits.request_timeout_s, wait_s=self._limits.image_wait_s
        )
        return meta

    async def _close(self, session_id: str) -> None:
        try:
            await self._engine.close(session_id)
        except RequestFailed:  # the engine is going down: it frees the session itself
            return


def _system_text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if any(not isinstance(part, TextPart) for part in message.content):
        raise invalid("the system message must be text", "messages")
    return "\n".join(part.text for part in message.content if isinstance(part, TextPart))


def _inline(url: str) -> str:
    if not url.startswith("data:"):
        raise invalid("only data: URLs are taken; this server fetches no URLs", "messages.content")
    return url


def _head(call: _Call) -> dict[str, Any]:
    return {"id": call.id, "object": "chat.completion.chunk", "created": call.created, "model": call.model}


def _chunk(call: _Call, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _event({**_head(call), "choices": [choice]})


def _event(payload: Any) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(payload)


def _usage(meta: dict[str, Any]) -> dict[str, int]:
    prompt, completion = meta["prompt_tokens"], meta["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
