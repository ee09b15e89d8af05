# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` with audio output, and `/v1/audio/speech`, both served by a `SpeechModel`.

vLLM's own chat handler renders the prompt (templates, images, audio, limits) and serves text-only
requests. As in OpenAI's API, a reply with audio contains its text in `message.audio.transcript` and
null in `content`, and a streamed reply contains pcm16 audio in base64. The response starts with the
first result. A failure before the first result is therefore reported with an HTTP status. A later
failure ends the stream with an error.
"""

import base64
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import torch
from fastapi import FastAPI
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens, with_cancellation
from vllm.exceptions import VLLMClientError
from vllm.logger import init_logger

from vllm_omni.composition.speech import AudioChunk, SpeechModel, TextDelta
from vllm_omni.entrypoints.speech.encode import MEDIA_TYPES, make_encoder, pcm16, wav_file
from vllm_omni.entrypoints.speech.protocol import (
    AudioParams,
    SpeechRequest,
    error_body,
    wants_audio,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.runtime import log_context, trace_context
from vllm_omni.seeds import chosen_seed

logger = init_logger("vllm." + __name__)

Event = TypeVar("Event")

_EXPIRES_S = 3600
_READ_ALOUD = "Read this text aloud, word for word:\n"


async def traced(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yield events, and record the total time as a `speech` span in the caller's trace."""
    span = trace_context.start_span("speech")
    if span.headers is not None:
        trace_context.set_parent(span.headers)  # for the tasks that start with the first event
    failed = True
    try:
        async for event in events:
            yield event
        failed = False
    except GeneratorExit:
        failed = False  # the client has disconnected
        raise
    finally:
        await events.aclose()
        span.end(failed)


class SpeechRoutes:
    def __init__(self) -> None:
        self._model: SpeechModel | None = None
        self._state: State | None = None

    def attach_to_app(self, app: FastAPI) -> None:
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/audio/speech", self.speech, methods=["POST"], response_model=None)

    def start_serving(self, model: SpeechModel, state: State) -> None:
        self._model, self._state = model, state

    # -- /v1/chat/completions ----------------------------------------------------------------------

    async def chat(self, request: ChatCompletionRequest, raw_request: Request) -> Response:
        try:
            audio = wants_audio(request.model_extra)
        except RequestFailed as failed:
            return _failure(failed)
        if audio is None:
            stock: Response = await create_chat_completion(request, raw_request)
            return stock

        response = Response(status_code=499)  # only for the access log

        @with_cancellation  # a disconnect before the first result aborts the request
        async def serve(request: ChatCompletionRequest, raw_request: Request) -> Response:
            nonlocal response
            response = await self._chat_with_sound(request, audio)
            return response

        # The value returned for a disconnected client differs between vLLM versions.
        await serve(request, raw_request)
        return response

    async def _chat_with_sound(
        self, request: ChatCompletionRequest, audio: AudioParams
    ) -> Response:
        request.seed = chosen_seed(request.seed)
        try:
            events = await self._chat_events(request, audio)
            if isinstance(events, Response):
                return events
            reply = _Reply(request, audio, self._serving()[0].sample_rate)
            if request.stream:
                stream = await _streamed(
                    reply.stream(events), "text/event-stream", reply.stream_error
                )
                return _with_seed(stream, request.seed)
            return _with_seed(JSONResponse(await reply.collect(events)), request.seed)
        except Exception as error:
            return _failure(error)

    async def _chat_events(
        self, request: ChatCompletionRequest, audio: AudioParams
    ) -> AsyncIterator[TextDelta | AudioChunk] | Response:
        model, serving = self._serving()
        if (request.n or 1) > 1:
            raise RequestFailed(
                "invalid_request", f"n={request.n}: one reply per request when it is spoken"
            )
        if request.use_beam_search:
            raise RequestFailed("invalid_request", "use_beam_search cannot be combined with audio")
        if request.stream and audio.format not in ("pcm16", "pcm"):
            raise RequestFailed(
                "invalid_request", f"audio.format {audio.format!r}: a streamed reply is pcm16"
            )
        model.check_voice(audio.voice_name)
        model.check_alive()
        rendered = await serving.render_chat_request(request)
        if isinstance(rendered, ErrorResponse):
            return _vllm_error(rendered)
        (engine_input,) = rendered[1]
        requested = (
            request.max_completion_tokens
            if request.max_completion_tokens is not None
            else request.max_tokens
        )
        max_tokens = get_max_tokens(
            serving.model_config.max_model_len,
            requested,
            len(engine_input["prompt_token_ids"]),
            serving.default_sampling_params,
        )
        params = request.to_sampling_params(max_tokens, serving.default_sampling_params)
        name = _request_id("chatcmpl")
        return traced(
            model.respond(engine_input, params, name, voice=audio.voice_name, seed=request.seed)
        )

    # -- /v1/audio/speech --------------------------------------------------------------------------

    async def speech(self, request: SpeechRequest, raw_request: Request) -> Response:
        request.seed = chosen_seed(request.seed)
        try:
            sound = await self._speech_events(request)
            if isinstance(sound, Response):
                return sound
            if request.stream_format == "sse":
                return _with_seed(
                    await _streamed(_speech_sse(sound), "text/event-stream", _sse_error),
                    request.seed,
                )
            encoder = make_encoder(request.response_format, self._serving()[0].sample_rate)

            async def encoded() -> AsyncIterator[bytes]:
                async for chunk in sound:
                    if data := encoder.feed(chunk.samples):
                        yield data
                yield encoder.finish()

            response = await _streamed(encoded(), MEDIA_TYPES[request.response_format], None)
            return _with_seed(response, request.seed)
        except Exception as error:
            return _failure(error)

    async def _speech_events(self, request: SpeechRequest) -> AsyncIterator[AudioChunk] | Response:
        model, serving = self._serving()
        model.check_voice(request.voice_name)
        model.check_alive()
        content = f"{request.instructions or ''}\n{_READ_ALOUD}{request.input}".lstrip()
        messages = [{"role": "user", "content": content}]
        chat = ChatCompletionRequest.model_validate({"model": request.model, "messages": messages})
        rendered = await serving.render_chat_request(chat)
        if isinstance(rendered, ErrorResponse):
            return _vllm_error(rendered)
        tokenizer = serving.renderer.get_tokenizer()
        text_ids = [
            *tokenizer.encode(request.input, add_special_tokens=False),
            tokenizer.eos_token_id,
        ]
        prompt_ids = rendered[1][0]["prompt_token_ids"]
        name = _request_id("speech")
        return traced(
            model.read_aloud(
                prompt_ids, text_ids, name, voice=request.voice_name, seed=request.seed
            )
        )

    def _serving(self) -> tuple[SpeechModel, Any]:
        """Return the speech model and vLLM's own chat handler."""
        assert self._model is not None and self._state is not None, (
            "vLLM initialises state before it serves"
        )
        return self._model, self._state.openai_serving_chat


class _Reply:
    """Builds one chat reply in OpenAI's schema, either complete or streamed.

    Args:
        request: The chat request.
        audio: Audio parameters.
        sample_rate: Sample rate in hertz.
    """

    def __init__(
        self, request: ChatCompletionRequest, audio: AudioParams, sample_rate: int
    ) -> None:
        self._audio, self._sample_rate = audio, sample_rate
        self._id = _request_id("chatcmpl")
        self._audio_id = _request_id("audio")
        self._created = int(time.time())
        self._model = request.model
        self._usage_wanted = bool(request.stream_options and request.stream_options.include_usage)
        self._prompt_tokens = 0
        self._reply_tokens = 0
        self._finish_reason: str | None = None

    def _note(self, event: TextDelta) -> None:
        completion = event.output.outputs[0]
        self._prompt_tokens = self._prompt_tokens or len(event.output.prompt_token_ids or ())
        self._reply_tokens += len(completion.token_ids)
        self._finish_reason = completion.finish_reason or self._finish_reason

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._reply_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._reply_tokens,
            "total_tokens": total,
        }

    async def collect(self, events: AsyncIterator[TextDelta | AudioChunk]) -> dict[str, Any]:
        text: list[str] = []
        sound: list[torch.Tensor] = []
        async for event in events:
            if isinstance(event, TextDelta):
                self._note(event)
                text.append(event.text)
            else:
                sound.append(event.samples)
        samples = torch.cat(sound) if sound else torch.zeros(0)
        if self._audio.format == "wav":
            data = wav_file(samples, self._sample_rate)
        else:
            encoder = make_encoder(self._audio.format, self._sample_rate)
            data = encoder.feed(samples) + encoder.finish() if sound else b""
        message = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "audio": {
                "id": self._audio_id,
                "data": base64.b64encode(data).decode(),
                "expires_at": self._created + _EXPIRES_S,
                "transcript": "".join(text),
            },
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish_reason,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    async def stream(self, events: AsyncIterator[TextDelta | AudioChunk]) -> AsyncIterator[bytes]:
        yield self._delta(
            {
                "role": "assistant",
                "content": None,
                "audio": {"id": self._audio_id, "transcript": ""},
            }
        )
        async for event in events:
            if isinstance(event, TextDelta):
                self._note(event)
                if event.text:
                    yield self._delta({"audio": {"id": self._audio_id, "transcript": event.text}})
            else:
                data = base64.b64encode(pcm16(event.samples)).decode()
                yield self._delta({"audio": {"id": self._audio_id, "data": data}})
        expires = {"id": self._audio_id, "expires_at": self._created + _EXPIRES_S}
        yield self._delta({"audio": expires}, self._finish_reason)
        if self._usage_wanted:
            yield _sse(
                {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}
            )
        yield b"data: [DONE]\n\n"

    def stream_error(self, error: Exception) -> bytes:
        return _sse(error_body(error)[1]) + b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _delta(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _sse({**self._head("chat.completion.chunk"), "choices": [choice]})


async def _speech_sse(sound: AsyncIterator[AudioChunk]) -> AsyncIterator[bytes]:
    async for chunk in sound:
        yield _sse(
            {"type": "speech.audio.delta", "audio": base64.b64encode(pcm16(chunk.samples)).decode()}
        )
    yield _sse({"type": "speech.audio.done"})


def _sse_error(error: Exception) -> bytes:
    return _sse({"type": "error", **error_body(error)[1]})


async def _streamed(parts: AsyncIterator[bytes], media_type: str, notify: Any) -> StreamingResponse:
    """Wait for a response's first part, and then stream all parts.

    If a later part fails, the result of `notify(error)` is sent as the last part. If `notify` is
    None, the connection is dropped instead.
    """
    first = await anext(parts, b"")

    async def body() -> AsyncIterator[bytes]:
        yield first
        try:
            async for part in parts:
                yield part
        except Exception as error:
            logger.exception("a streamed reply failed")
            if notify is None:
                raise
            yield notify(error)
        finally:
            await parts.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(body(), media_type=media_type)


def _with_seed(response: Response, seed: int | None) -> Response:
    """Add the seed to a response as a header, because audio responses have no field for it.

    If the request has no seed, no header is added.
    """
    if seed is not None:
        response.headers["X-Seed"] = str(seed)
    return response


def _failure(error: Exception) -> Response:
    if isinstance(error, VLLMClientError | ValueError):
        return _vllm_error(create_error_response(error))
    status, body = error_body(error)
    if not isinstance(error, RequestFailed):
        logger.exception("a request failed", exc_info=error)
    return JSONResponse(body, status_code=status)


def _vllm_error(error: ErrorResponse) -> Response:
    return JSONResponse(error.model_dump(), status_code=error.error.code)


def _sse(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def _request_id(kind: str) -> str:
    """Return an engine request id that contains the HTTP request's id so that the engines' log
    lines also contain it.
    """
    return "-".join([kind, *log_context.current().values(), secrets.token_hex(16)])
