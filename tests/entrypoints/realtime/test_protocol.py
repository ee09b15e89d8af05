# SPDX-License-Identifier: Apache-2.0
"""Parsing of realtime endpoint messages: every decoded value yields either a message or an
`EndpointError`.
"""

import re

import pytest
from fuzz_endpoints import check, fuzz
from helpers.fake_engine import infer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import MESSAGES

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.codec import decode, encode
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.sessions.session import new_session_id
from vllm_omni.entrypoints.realtime.world_camera import protocol

LIMITS = EndpointLimits()
CODES = {
    "invalid_request",
    "unknown_endpoint",
    "prompt_too_long",
    "unsupported_codec",
    "missing_camera",
    "invalid_camera",
    "non_finite_pose",
}


def understand(value: object) -> None:
    """Parse a decoded value as the endpoint does before it looks up a session."""
    refusal: EndpointError | None = None
    try:
        message = protocol.parse(value, LIMITS)
        if isinstance(message, protocol.InferMessage):
            message.camera_path(max_poses=100, size=(832, 480))
    except EndpointError as error:
        refusal = error
    if refusal is not None:
        assert refusal.code in CODES
        assert not re.search(r"0x[0-9a-f]|/|Traceback", refusal.message)


def test_whole_floats_are_integers() -> None:
    """A float with a whole value is read as an integer, because JavaScript sends 100000.0 for
    100000. Fractions are rejected.
    """
    message = protocol.parse(
        infer(extra_body={"seed": 100000.0, "height": 32.0, "fps": 16}), LIMITS
    )
    assert isinstance(message, protocol.InferMessage)
    assert (message.extra_body.seed, message.extra_body.height, message.extra_body.fps) == (
        100000,
        32,
        16.0,
    )
    with pytest.raises(EndpointError, match="invalid_request"):
        protocol.parse(infer(extra_body={"seed": 1.5}), LIMITS)


def test_unknown_keys_are_ignored_and_null_is_absent() -> None:
    """Unknown keys are ignored and null means absent, because other clients of this protocol send
    extra keys and send null for unset fields.
    """
    message = protocol.parse(
        infer(robot="arm", session_id=None, extra_body={"session_id": None, "zoom": 3}), LIMITS
    )
    assert message.session_id is None


def test_only_the_given_options_reach_the_model() -> None:
    """Named settings and `options` are merged into one map, which contains only the options that
    the client sent, because the model has defaults for the others.
    """
    extra = {"num_inference_steps": 3, "options": {"shift": 5.0}}
    message = protocol.parse(infer(extra_body=extra), LIMITS)
    assert isinstance(message, protocol.InferMessage)
    assert message.extra_body.model_options() == {"num_inference_steps": 3, "shift": 5.0}


def test_session_ids_are_unguessable_and_legal() -> None:
    """Session ids encode 128 random bits in the alphabet of valid ids."""
    ids = {new_session_id() for _ in range(100)}
    assert len(ids) == 100
    for session_id in ids:
        assert len(session_id) >= 22
        protocol.parse({"endpoint": "ping", "session_id": session_id}, LIMITS)


@given(
    MESSAGES
    | st.dictionaries(
        st.sampled_from(list(infer())), st.integers() | st.text() | st.lists(st.integers())
    )
)
@settings(max_examples=300, deadline=None)
def test_any_decoded_value_is_a_message_or_an_endpoint_error(value: object) -> None:
    """Parsing a decoded value either yields a message or raises `EndpointError`, whatever the
    value's type, range and keys.
    """
    understand(decode(encode(value)).value if isinstance(value, dict) and _fits(value) else value)


def _fits(value: dict) -> bool:
    return all(
        not isinstance(item, int) or -(2**63) <= item < 2**64 for item in value.values()
    ) and not any(
        isinstance(item, list)
        and any(not -(2**63) <= n < 2**64 for n in item if isinstance(n, int))
        for item in value.values()
    )


@pytest.mark.parametrize(
    ("count", "seed"), [(30_000, 1), pytest.param(10_000_000, 2, marks=pytest.mark.nightly)]
)
def test_mutated_messages_end_in_documented_errors(count: int, seed: int) -> None:
    """For mutated messages, the decoders and parsers of all endpoints raise only documented errors,
    and their memory use is bounded.
    """
    check(fuzz(count, seed))
