# SPDX-License-Identifier: Apache-2.0
"""Tests of the table of vLLM's request handlers that can return or must refuse hidden states. No
server runs in these tests; tests/entrypoints/test_hidden_states_served.py uses the handlers.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_omni.entrypoints.ar_plugin import _HANDLERS, RefusingEngineClient

ENTRYPOINTS = Path(vllm.__file__).parent / "entrypoints"
PROTOCOLS = {
    "anthropic": {"/v1/messages"},
    "openai/chat_completion": {"/v1/chat/completions", "/v1/chat/completions/batch"},
    "openai/completion": {"/v1/completions"},
    "openai/responses": {"/v1/responses"},
    "scale_out/token_in_token_out": {"/inference/v1/generate"},
    "speech_to_text/transcription": {"/v1/audio/transcriptions"},
    "speech_to_text/translation": {"/v1/audio/translations"},
}
"""Routes whose requests may contain extra arguments, by the folder of the request's definition."""


def test_every_route_with_extra_arguments_has_a_handler() -> None:
    """A route of vLLM that passes a client's extra arguments to the engine is in `_HANDLERS`.

    If a new vLLM version adds such a route, this test fails, because a wrong request for hidden
    states on the route would be a server error.
    """
    field = re.compile(r"^    (vllm_xargs|sampling_params): ", re.M)
    folders = {
        str(file.parent.relative_to(ENTRYPOINTS))
        for file in ENTRYPOINTS.rglob("protocol.py")
        if field.search(file.read_text())
    }
    assert folders == PROTOCOLS.keys()
    assert set().union(*PROTOCOLS.values()) == {handler.path for handler in _HANDLERS}


def test_the_handlers_exist_in_the_state_of_vllm() -> None:
    sources = "".join(file.read_text() for file in ENTRYPOINTS.rglob("*.py"))
    for handler in _HANDLERS:
        assert f"state.{handler.attribute} = " in sources


def test_a_route_without_response_id_refuses_hidden_states() -> None:
    """The error names the routes that return hidden states. Other requests reach the engine."""
    calls: list[str] = []

    def generate(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> str:
        calls.append(request_id)
        return "outputs"

    engine: Any = SimpleNamespace(generate=generate, errored=False)
    client = RefusingEngineClient(engine)
    requested = SamplingParams(extra_args={"omni": '{"hidden_states": "last"}'})
    with pytest.raises(VLLMValidationError, match="allowed: /v1/chat/completions, "):
        client.generate("", requested, "transcribe-1")
    malformed = SamplingParams(extra_args={"omni": '{"hidden_states": "foo"}'})
    with pytest.raises(VLLMValidationError, match="generated"):
        client.generate("", malformed, "transcribe-2")
    assert client.generate("", SamplingParams(), "transcribe-3") == "outputs"
    assert calls == ["transcribe-3"] and client.errored is False
