# SPDX-License-Identifier: Apache-2.0
"""Request bodies and errors of the speech routes, in OpenAI's schema."""

from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_omni.composition.composed_engine import ComposedEngineDied
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import MAX_SEED, RANDOM_SEED

MAX_TEXT = 4096
"""Maximum number of input characters for `/v1/audio/speech`, as in OpenAI's API."""

AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"]
Seed = Annotated[int, Field(ge=RANDOM_SEED, le=MAX_SEED)]


class VoiceId(BaseModel):
    id: str
    """Voice name."""


class AudioParams(BaseModel):
    """Contents of a chat request's `audio` field."""

    model_config = ConfigDict(extra="forbid")

    voice: str | VoiceId | None = None
    """Voice of the reply. Default: the model's default voice."""
    format: AudioFormat = "wav"
    """Audio format. Default: wav."""

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class SpeechRequest(BaseModel):
    """Request body of `/v1/audio/speech`.

    The `seed` field is an extension that makes the speech reproducible. The value -1 selects a
    random seed.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    """Model name. Default: the name is not checked."""
    input: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    """Text to speak."""
    voice: str | VoiceId | None = None
    """Voice to speak with. Default: the model's default voice."""
    response_format: AudioFormat = "mp3"
    """Audio format. Default: mp3."""
    stream_format: Literal["audio", "sse"] = "audio"
    """Response form: `audio` for the bytes of a file, or `sse` for server-sent events. Default:
    `audio`.
    """
    instructions: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    """Instructions for the speaking style."""
    speed: Annotated[float, Field(ge=1.0, le=1.0)] = 1.0
    """Speech speed. The only supported value is 1.0."""
    seed: Seed | None = None
    """Extension. Seed for sampling. The value -1 selects a random seed. Default: no seed is set."""

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


def wants_audio(extra: dict[str, Any] | None) -> AudioParams | None:
    """Read a chat request's `modalities` and `audio` fields.

    Returns:
        Audio parameters, or None if the client requests only text.

    Raises:
        RequestFailed: The fields are invalid.
    """
    extra = extra or {}
    modalities = extra.get("modalities") or ["text"]
    if not isinstance(modalities, list) or not set(map(str, modalities)) <= {"text", "audio"}:
        raise RequestFailed(
            "invalid_request",
            f"modalities must be a list of 'text' and 'audio', got {modalities!r}",
        )
    if "audio" not in modalities:
        return None
    try:
        return AudioParams.model_validate(extra.get("audio") or {})
    except ValidationError as error:
        raise RequestFailed("invalid_request", f"audio: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


_CLIENT_FAULTS = {"invalid_request", "too_long", "too_large"}


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the OpenAI-style body for an exception. The body contains no
    messages from other libraries.
    """
    if isinstance(error, RequestFailed):
        status = (
            HTTPStatus.BAD_REQUEST
            if error.code in _CLIENT_FAULTS
            else HTTPStatus.INTERNAL_SERVER_ERROR
        )
        kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "InternalServerError"
        return status, _body(error.message, kind, status, error.code)
    if isinstance(error, ComposedEngineDied):
        status = HTTPStatus.SERVICE_UNAVAILABLE
        return status, _body(str(error), "ServiceUnavailableError", status, "stage_died")
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return status, _body(
        "the server failed on this request; its log has the details", "InternalServerError", status
    )


def _body(message: str, kind: str, status: int, reason: str | None = None) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": None,
            "code": int(status),
            "reason": reason,
        }
    }
