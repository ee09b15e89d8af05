# SPDX-License-Identifier: Apache-2.0
"""Fields and messages of a chat completion request. This module is independent of the engine and
the model.

General-purpose clients send many fields with neutral values, such as `presence_penalty` 0 or
`tools` []. These neutral values are accepted. If a value requires a feature that these models lack,
the error names the field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from vllm_omni.entrypoints.errors import ApiError, invalid
from vllm_omni.entrypoints.openai.protocol import MAX_PROMPT_CHARS, read_request
from vllm_omni.seeds import MAX_SEED, RANDOM_SEED

_MAX_MESSAGES: Final = 256
_MAX_CHARS: Final = 4 * MAX_PROMPT_CHARS
"""Maximum total number of characters in all messages."""

Text = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class DataUrl(_Strict):
    url: str
    """The media as a `data:` URL. Other URLs are not accepted."""
    detail: Literal["auto", "low", "high"] | None = None
    """This field is accepted for compatibility and has no effect."""


class TextPart(_Strict):
    type: Literal["text"]
    """Type of the part."""
    text: Text
    """Text of the part."""


class ImagePart(_Strict):
    type: Literal["image_url"]
    """Type of the part."""
    image_url: DataUrl
    """Image of the part."""


class VideoPart(_Strict):
    type: Literal["video_url"]
    """Type of the part."""
    video_url: DataUrl
    """Video of the part."""


Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[
        list[Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]], Tag("parts")
    ],
    Discriminator(lambda content: "parts" if isinstance(content, list) else "text"),
]
Nothing = Annotated[list[Any], Field(max_length=0)] | None


class UserMessage(_Strict):
    role: Literal["system", "developer", "user"]
    """Author of the message. `developer` is an alias for `system`."""
    content: Content
    """Message text, or a list of parts."""
    name: str | None = Field(None, max_length=64)
    """This field is accepted for compatibility and has no effect."""


class AssistantMessage(_Strict):
    """An earlier response in the conversation."""

    role: Literal["assistant"]
    """Author of the message."""
    content: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | list[TextPart] | None = None
    """Response text."""
    refusal: None = None
    """This field is accepted for compatibility and has no effect."""
    tool_calls: Nothing = None
    """This field must be empty if it is present."""
    name: str | None = Field(None, max_length=64)
    """This field is accepted for compatibility and has no effect."""


Message = Annotated[
    Annotated[UserMessage, Tag("user")] | Annotated[AssistantMessage, Tag("assistant")],
    Discriminator(
        lambda message: (
            "assistant"
            if (
                message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
            )
            == "assistant"
            else "user"
        )
    ),
]


class StreamOptions(_Strict):
    include_usage: bool | None = None
    """Whether a streamed response ends with its token counts. Default: False."""
    include_obfuscation: bool | None = None
    """This field is accepted for compatibility and has no effect."""


class TextFormat(_Strict):
    type: Literal["text"]
    """Type of the response. The only supported type is `text`."""


class ChatRequest(_Strict):
    messages: list[Message] = Field(min_length=1, max_length=_MAX_MESSAGES)
    """Messages in the conversation, oldest first."""
    model: str | None = Field(None, max_length=1024)
    """Name of the model or of a LoRA adapter. Default: the served model."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of generated tokens. Alias for `max_completion_tokens`."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Maximum number of generated tokens. Default: the model's default."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Sampling temperature, 0 to 2. Default: 0 (greedy)."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling threshold in (0, 1]. Default: the model's default."""
    stop: str | list[str] | None = None
    """Strings that end the response. Default: none."""
    seed: int | None = Field(None, ge=RANDOM_SEED, le=MAX_SEED)
    """Sampling seed. Default: a random seed, which -1 also selects."""
    n: Literal[1] | None = None
    """Number of responses. The only supported value is 1."""
    stream: bool | None = None
    """Whether to send server-sent events. Default: False."""
    stream_options: StreamOptions | None = None
    """Options for a streamed response."""
    response_format: TextFormat | None = None
    """Format of the response. The only supported format is text."""
    modalities: list[Literal["text"]] | None = None
    """Modalities of the response. The only supported modality is text."""
    user: str | None = Field(None, max_length=1024)
    """This field is accepted for compatibility and has no effect."""
    safety_identifier: str | None = Field(None, max_length=1024)
    """This field is accepted for compatibility and has no effect."""
    prompt_cache_key: str | None = Field(None, max_length=1024)
    """This field is accepted for compatibility and has no effect."""
    metadata: dict[str, str] | None = Field(None, max_length=16)
    """This field is accepted for compatibility and has no effect."""
    store: Literal[False] | None = None
    """This field must be False if it is present."""
    service_tier: Literal["auto", "default"] | None = None
    """This field is accepted for compatibility and has no effect."""
    # These models lack the following features, so only neutral values are accepted
    # (`_UNSUPPORTED`).
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    """This field must be 0 if it is present."""
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    """This field must be 0 if it is present."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    """This field must be empty if it is present."""
    logprobs: Literal[False] | None = None
    """This field must be False if it is present."""
    top_logprobs: Literal[0] | None = None
    """This field must be 0 if it is present."""
    tools: Nothing = None
    """This field must be empty if it is present."""
    tool_choice: Literal["none", "auto"] | None = None
    """This field is accepted for compatibility and has no effect."""
    parallel_tool_calls: bool | None = None
    """This field is accepted for compatibility and has no effect, because these models use no
    tools.
    """
    functions: Nothing = None
    """This field must be empty if it is present."""
    function_call: Literal["none", "auto"] | None = None
    """This field is accepted for compatibility and has no effect."""
    extra_params: dict[str, Any] | None = None
    """Extension. Options specific to the served model."""


_UNSUPPORTED: Final = {
    "tools": "call tools",
    "tool_choice": "call tools",
    "functions": "call functions",
    "function_call": "call functions",
    "logprobs": "return logprobs",
    "top_logprobs": "return logprobs",
    "logit_bias": "bias its logits",
    "presence_penalty": "penalise tokens: presence_penalty must be 0",
    "frequency_penalty": "penalise tokens: frequency_penalty must be 0",
    "response_format": "guarantee a format: response_format must be {'type': 'text'}",
    "modalities": "respond in anything but text",
    "n": "return several responses: n must be 1",
    "store": "store completions",
}


def read_chat(fields: Mapping[str, Any], model: str) -> ChatRequest:
    """Validate the fields of a chat completion request.

    Raises:
        ApiError: Status 400. The code is `unsupported_parameter` if the request uses a feature that
            the served model lacks.
    """
    try:
        return read_request(ChatRequest, fields)
    except ApiError as error:
        field = (error.param or "").split(".")[0]
        if field in _UNSUPPORTED:
            raise invalid(
                f"{model} cannot {_UNSUPPORTED[field]}", field, "unsupported_parameter"
            ) from None
        raise


@dataclass(frozen=True)
class MediaConversation:
    """A conversation that ends with a user message, and the image or clip that it is about."""

    system: str | None
    """Text of the system messages. None: the conversation has no system message."""
    messages: list[dict[str, str]]
    """Messages before the last user message, each with the keys `role` and `text`."""
    question: str
    """Text of the last user message."""
    seen: ImagePart | VideoPart | None
    """Image or clip in the conversation. None: the conversation is text only."""
    seen_in: int | None
    """Index in `messages` of the message that contains the image or clip. None: the last user
    message contains it, or the conversation is text only.
    """


def read_conversation(messages: Sequence[UserMessage | AssistantMessage]) -> MediaConversation:
    """Check the messages of a request, and return them as a conversation.

    Raises:
        ApiError: Status 400 if the messages are invalid.
    """
    system: list[str] = []
    turns: list[dict[str, str]] = []
    shown: list[tuple[int, ImagePart | VideoPart]] = []
    for message in messages:
        parts = _parts(message)
        text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
        seen = [part for part in parts if not isinstance(part, TextPart)]
        if message.role in ("system", "developer"):
            if turns:
                raise invalid("system messages come before all others", "messages")
            if seen:
                raise invalid("the system message must be text", "messages")
            system.append(text)
            continue
        if message.role == "user" and not text:
            raise invalid("a user message must have a text part", "messages.content")
        shown += [(len(turns), part) for part in seen]
        if text:
            turns.append({"role": message.role, "text": text})
    if not turns or messages[-1].role != "user":
        raise invalid("the last message must be a user message", "messages")
    if len(shown) > 1:
        raise invalid(
            f"messages have {len(shown)} images and clips; this model accepts one per conversation",
            "messages",
        )
    if (chars := sum(map(len, system)) + sum(len(turn["text"]) for turn in turns)) > _MAX_CHARS:
        raise invalid(
            f"messages have {chars} characters; at most {_MAX_CHARS}",
            "messages",
            "context_length_exceeded",
        )
    question = turns.pop()["text"]
    where, image = shown[0] if shown else (None, None)
    return MediaConversation(
        "\n".join(system) if system else None,
        turns,
        question,
        image,
        None if where == len(turns) else where,
    )


def _parts(message: UserMessage | AssistantMessage) -> Sequence[TextPart | ImagePart | VideoPart]:
    if message.content is None:
        return ()
    if isinstance(message.content, str):
        return (TextPart.model_construct(type="text", text=message.content),)
    return message.content
