# SPDX-License-Identifier: Apache-2.0
"""Parsing of a chat completion request: its fields, and the conversation in its messages."""

from typing import Any

import pytest

from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.openai.chat_request import ChatRequest, read_chat, read_conversation

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
USER = {"role": "user", "content": "hello"}


def said(role: str, *content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": role, "content": parts}


def read(*messages: Any, **fields: Any) -> ChatRequest:
    return read_chat({"messages": list(messages), **fields}, "lance")


def test_turns_stay_in_order_and_the_image_in_its_turn() -> None:
    """Turns stay in order, each with its images. System texts are joined, an empty assistant
    message is not a turn, and the last user message is the question.
    """
    talk = read_conversation(
        read(
            said("system", "Be brief."),
            said("developer", "Be kind."),
            said("user", "hello"),
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
            said("user", IMAGE, "look", "here"),
            {"role": "assistant", "content": "A cat."},
            said("user", "What colour?"),
        ).messages
    )
    assert (talk.system, talk.question, talk.seen_in) == ("Be brief.\nBe kind.", "What colour?", 1)
    assert talk.messages == [
        {"role": "user", "text": "hello"},
        {"role": "user", "text": "look\nhere"},
        {"role": "assistant", "text": "A cat."},
    ]
    assert talk.seen is not None
    alone = read_conversation(read(said("user", IMAGE, "what?")).messages)
    assert (alone.messages, alone.seen_in, alone.seen is None) == ([], None, False)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tools": None,
            "tool_choice": "none",
            "functions": [],
            "function_call": "auto",
            "parallel_tool_calls": True,
        },
        {
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "logprobs": False,
            "top_logprobs": 0,
        },
        {
            "n": 1,
            "stop": None,
            "stream": None,
            "response_format": {"type": "text"},
            "modalities": ["text"],
        },
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "prompt_cache_key": "k",
        },
    ],
)
def test_neutral_values_are_accepted(fields: dict[str, Any]) -> None:
    assert read(USER, **fields).messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -2}, "frequency_penalty"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"n": 3}, "n"),
        ({"store": True}, "store"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match="lance cannot") as refused:
        read(USER, **fields)
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        400,
        "unsupported_parameter",
        param,
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([said("user", IMAGE, "a"), said("user", IMAGE, "b")], "2 images and clips"),
        ([USER, {"role": "assistant", "content": "hi"}], "last message must be a user"),
        ([said("system", "a")], "last message must be a user"),
        ([USER, said("system", "a"), USER], "system messages come before"),
        ([said("system", IMAGE), USER], "system message must be text"),
        ([said("user", IMAGE)], "must have a text part"),
        ([{"role": "user", "content": "x" * 16000}] * 5, "80000 characters"),
    ],
)
def test_a_conversation_that_cannot_be_served_is_an_error(
    messages: list[Any], message: str
) -> None:
    with pytest.raises(ApiError, match=message):
        read_conversation(read(*messages).messages)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "1", "tool_call_id": "a"}, "messages"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, "messages"),
        ({"role": "assistant", "content": [IMAGE]}, "messages"),
        ("hello", "messages"),
    ],
)
def test_messages_of_other_kinds_are_errors(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(USER, message)
    assert refused.value.status == 400 and (refused.value.param or "").startswith(param)
