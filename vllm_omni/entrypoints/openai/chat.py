# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` for models on the diffusion worker that understand text, images and
videos.

A call contains a conversation that ends with a user message. System messages come first, followed
by user and assistant messages with at most one `image_url` or `video_url` (a `data:` URL). Fields
with neutral values are accepted because general-purpose clients send them. If a field requires a
feature that these models lack, the request is refused (`chat_request.py`).

A response that is not streamed takes one engine request. A streamed response uses a session, with
one engine request for every few tokens. A slow client therefore does not block others, and a
disconnect wastes at most one request. `Capabilities.reads` lists the kinds of input that a model
accepts. Models that generate text through stock vLLM use vLLM's own `/v1/chat/completions`.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.errors import from_failure, invalid, respond_to_errors
from vllm_omni.entrypoints.openai.body import read_body
from vllm_omni.entrypoints.openai.chat_request import (
    ChatRequest,
    ImagePart,
    VideoPart,
    read_chat,
    read_conversation,
)
from vllm_omni.entrypoints.openai.client_threads import ClientThreads, until_disconnected
from vllm_omni.entrypoints.openai.image_files import read_upload
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.openai.videos.clips import read_clip
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.inputs import DiffusionParams, Lora
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import definite_seed

_CHUNK_TOKENS: Final = 8


@dataclass(frozen=True)
class _Call:
    """A validated chat completion call."""

    request: ChatRequest
    """The client's request."""
    model: str
    """Model name, as stated in replies."""
    prompt: str
    """Text of the last user message."""
    seed: int
    """Sampling seed."""
    lora: list[Lora] | None
    """LoRA adapters to apply. None: the adapters are not changed."""
    options: dict[str, Any]
    """Model options."""
    arrays: dict[str, np.ndarray]
    """The image or clip in the conversation. Empty if the conversation is text only."""
    id: str
    """Id of the response."""
    created: int
    """Unix time, in seconds, at which the response was created."""


class ChatRoutes:
    """The chat route of one API server process."""

    def __init__(
        self,
        engine: OmniEngine,
        served: ServedModel,
        limits: MediaLimits,
        endpoint_limits: EndpointLimits,
        threads: ClientThreads,
    ) -> None:
        self._engine, self._served = engine, served
        self._limits, self._endpoint_limits, self._threads = limits, endpoint_limits, threads

    @respond_to_errors
    async def completions(self, request: Request) -> Response:
        reads = self._served.capabilities.reads
        if not reads:
            raise invalid(
                f"{self._served.names[0]} does not generate text", code="unsupported_by_model"
            )
        body = await read_body(request, self._limits.max_body_bytes)
        call = await self._read(request, read_chat(body.fields, self._served.names[0]))
        kind = next(iter(call.arrays), None)
        if kind is not None and kind not in reads:
            raise invalid(
                f"{call.model} reads {' and '.join(reads)}, not {kind}",
                "messages",
                "unsupported_by_model",
            )
        if call.request.stream:
            return StreamingResponse(self._events(call), media_type="text/event-stream")
        return JSONResponse(await until_disconnected(request, self._whole(call)))

    # -- the request -------------------------------------------------------------------------------

    async def _read(self, request: Request, requested: ChatRequest) -> _Call:
        """Check the messages, and decode the image or clip on a worker thread.

        Raises:
            ApiError: Status 400 if a message or its image or clip is invalid.
        """
        lora = self._served.adapter_named(requested.model)
        conversation = read_conversation(requested.messages)
        arrays = (
            {}
            if conversation.seen is None
            else await self._decode_media(request, conversation.seen)
        )
        options: dict[str, Any] = {**(requested.extra_params or {}), "modalities": ["text"]}
        if conversation.seen is None:
            options["task"] = "t2t"
        if conversation.system is not None:
            options["system_prompt"] = conversation.system
        if conversation.messages:
            options["turns"] = conversation.messages
        if conversation.seen_in is not None:
            options["picture_turn"] = conversation.seen_in
        limit = requested.max_completion_tokens or requested.max_tokens
        stop = [requested.stop] if isinstance(requested.stop, str) else requested.stop
        chosen = {
            "max_tokens": limit,
            "temperature": requested.temperature,
            "top_p": requested.top_p,
            "stop": stop,
        }
        options |= {name: value for name, value in chosen.items() if value is not None}
        return _Call(
            request=requested,
            model=requested.model or self._served.names[0],
            prompt=conversation.question,
            seed=definite_seed(requested.seed),
            lora=lora or None,
            options=options,
            arrays=arrays,
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
        )

    async def _decode_media(
        self, request: Request, part: ImagePart | VideoPart
    ) -> dict[str, np.ndarray]:
        if isinstance(part, ImagePart):
            url = _inline(part.image_url.url)
            return {
                "image": await self._threads.image(
                    request, read_upload, url, "messages", self._endpoint_limits
                )
            }
        url, rate = _inline(part.video_url.url), self._served.capabilities.fps
        most = self._served.capabilities.read_frames
        return {
            "video": await self._threads.clip(
                request, read_clip, url, rate, most, "messages.content"
            )
        }

    # -- the response ------------------------------------------------------------------------------

    async def _whole(self, call: _Call) -> dict[str, Any]:
        params = DiffusionParams(
            session_id=call.id,
            one_shot=True,
            prompt=call.prompt,
            seed=call.seed,
            lora=call.lora,
            options=call.options,
        )
        meta = await self._run(params, call.arrays)
        message = {"role": "assistant", "content": meta["text"], "refusal": None}
        return {
            "id": call.id,
            "object": "chat.completion",
            "created": call.created,
            "model": call.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": meta["finish_reason"],
                }
            ],
            "usage": _usage(meta),
            "seed": call.seed,
        }

    async def _events(self, call: _Call) -> AsyncGenerator[bytes]:
        """Yield server-sent events, one for each part of the response.

        The session is closed when the stream ends.
        """
        arrays = call.arrays
        params = DiffusionParams(
            session_id=call.id,
            prompt=call.prompt,
            seed=call.seed,
            lora=call.lora,
            options={**call.options, "chunk_tokens": _CHUNK_TOKENS},
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
            if (
                call.request.stream_options is not None
                and call.request.stream_options.include_usage
            ):
                yield _event({**_head(call), "choices": [], "usage": _usage(meta)})
            yield b"data: [DONE]\n\n"
        except RequestFailed as failure:
            yield _event(msgspec.json.decode(bytes(from_failure(failure).response().body)))
        finally:
            await asyncio.shield(self._close(call.id))

    async def _run(self, params: DiffusionParams, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        meta, _ = await self._engine.run_when_room(
            params,
            arrays,
            timeout_s=self._limits.request_timeout_s,
            wait_s=self._limits.image_wait_s,
        )
        return meta

    async def _close(self, session_id: str) -> None:
        try:
            await self._engine.close_session(session_id)
        except RequestFailed:  # the engine is shutting down and frees the session itself
            return


def _inline(url: str) -> str:
    if not url.startswith("data:"):
        raise invalid(
            "only data: URLs are accepted; this server fetches no URLs", "messages.content"
        )
    return url


def _head(call: _Call) -> dict[str, Any]:
    head = {
        "id": call.id,
        "object": "chat.completion.chunk",
        "created": call.created,
        "model": call.model,
    }
    return {**head, "seed": call.seed}


def _chunk(call: _Call, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _event({**_head(call), "choices": [choice]})


def _event(payload: Any) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(payload)


def _usage(meta: dict[str, Any]) -> dict[str, int]:
    prompt, completion = meta["prompt_tokens"], meta["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
