# SPDX-License-Identifier: Apache-2.0
"""Request bodies of the speech routes, errors for invalid bodies, and error responses."""

from typing import Any

import pytest
from pydantic import ValidationError

from vllm_omni.composition.composed_engine import ComposedEngineDied
from vllm_omni.entrypoints.speech.protocol import SpeechRequest, error_body, wants_audio
from vllm_omni.outputs import RequestFailed


@pytest.mark.parametrize(
    "extra", [None, {}, {"modalities": ["text"]}, {"modalities": None, "audio": {"format": "?"}}]
)
def test_text_only_requests_are_left_to_vllm(extra: dict[str, Any] | None) -> None:
    assert wants_audio(extra) is None


def test_audio_parameters() -> None:
    audio = wants_audio(
        {"modalities": ["text", "audio"], "audio": {"voice": {"id": "Ethan"}, "format": "pcm16"}}
    )
    assert audio is not None
    assert (audio.voice_name, audio.format) == ("Ethan", "pcm16")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"modalities": "audio"}, "must be a list"),
        ({"modalities": ["audio", "smell"]}, "'text' and 'audio'"),
        ({"modalities": ["audio"], "audio": {"format": "midi"}}, "format"),
        ({"modalities": ["audio"], "audio": {"pitch": 2}}, "pitch"),
    ],
)
def test_refusals_name_the_field(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        wants_audio(extra)
    assert failed.value.code == "invalid_request" and says in failed.value.message


@pytest.mark.parametrize(
    "body", [{"input": ""}, {"input": "x" * 4097}, {"input": "x", "speed": 2}, {"voice": "a"}]
)
def test_speech_requests_out_of_range(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SpeechRequest.model_validate(body)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (RequestFailed("invalid_request", "voice 'x'"), 400, "voice"),
        (RequestFailed("non_finite", "NaN"), 500, "NaN"),
        (ComposedEngineDied("talker"), 503, "'talker' has died"),
        (RuntimeError("/secret/path"), 500, "log has the details"),
    ],
)
def test_failures_have_a_status_and_no_inner_text(error: Exception, status: int, says: str) -> None:
    found, body = error_body(error)
    assert found == status and says in body["error"]["message"]
    assert "secret" not in str(body)
