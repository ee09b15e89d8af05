# SPDX-License-Identifier: Apache-2.0
"""Tests of request parameters and tensors: transport, validation and errors."""

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_omni
from vllm_omni.inputs import DiffusionParams, refuse_unused, request_tensors
from vllm_omni.outputs import RequestFailed


def test_params_and_tensors_survive_the_wire() -> None:
    """Parameters and tensors arrive unchanged when vLLM's serialiser transfers them from the front
    end to the engine.
    """
    from vllm import PoolingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    params = DiffusionParams(
        session_id="s", prompt="p", seed=2**64 - 1, actions=[["w"], []], options={"x": [1.5]}
    )
    tensors = {
        "poses": torch.eye(4).repeat(9, 1, 1),
        "image": torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3),
    }
    wire = MsgpackEncoder().encode(params.to_pooling_params(tensors))
    extra = MsgpackDecoder(PoolingParams).decode(wire).extra_kwargs
    assert DiffusionParams.from_extra_kwargs(extra) == params
    arrived = request_tensors(extra)
    assert set(arrived) == set(tensors)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
    again = request_tensors(extra)
    shared = {name for name in tensors if arrived[name].data_ptr() == again[name].data_ptr()}
    assert shared == {"image"}, "large images are not copied; other tensors may be written to"


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "a/b"}, "session_id"),
        ({"session_id": "a" * 129}, "session_id"),
        ({"session_id": "a\n"}, "session_id"),
        ({"session_id": "s", "chunk_index": -1}, "chunk_index"),
        ({"session_id": "s", "seed": 2**64}, "seed"),
        ({"session_id": "s", "height": 4}, "height"),
        ({"session_id": "s", "output": "mp4"}, "output"),
        ({"session_id": "s", "op": "explode"}, "op"),
        ({"session_id": "s", "actions": "w"}, "actions"),
        ({"session_id": "s", "nope": 1}, "nope"),
        ({}, "session_id"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], reported: str) -> None:
    with pytest.raises(RequestFailed, match=reported) as failure:
        DiffusionParams.from_extra_kwargs({"omni": fields})
    assert failure.value.code == "invalid_request"


def test_no_pattern_of_python_accepts_a_trailing_newline() -> None:
    r"""Patterns end with `\Z`, so they do not accept a trailing newline. In Python, `$` also
    matches before a final newline.

    In Pydantic's own regex engine, `$` does not match before a final newline.
    """
    package = Path(vllm_omni.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) == "Field":
                continue
            given = [word.value for word in call.keywords if word.arg == "pattern"]
            if ast.unparse(call.func).startswith("re."):
                given += call.args[:1]
            patterns = [one.value for one in given if isinstance(one, ast.Constant)]
            found += [
                f"{path.name}:{call.lineno}"
                for one in patterns
                if str(one).replace(r"\$", "").count("$")
            ]
    assert found == []


@pytest.mark.parametrize("packed", [b"", b"x" * 7, b"VOMN" + b"\xff" * 60, "text", 3, {"a": 1}])
def test_malformed_tensors_are_refused(packed: object) -> None:
    with pytest.raises(RequestFailed) as failure:
        request_tensors({"omni_tensors": packed})
    assert failure.value.code == "invalid_request"


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_raise_only_the_documented_error(packed: bytes) -> None:
    with pytest.raises(RequestFailed):
        request_tensors({"omni_tensors": packed})


def test_only_the_parameters_that_a_model_uses_are_accepted() -> None:
    """Parameters that the model does not use are refused with one error that names each of them.

    A parameter that has its default value is accepted, because it does not count as sent.
    """
    params = DiffusionParams(session_id="s", prompt="a field", fps=8.0, num_images=2)
    refuse_unused(params, ("prompt", "fps", "num_images"))
    refuse_unused(DiffusionParams(session_id="s", chunk_index=3, output="both", deadline_s=1.0), ())
    with pytest.raises(
        RequestFailed, match="does not use num_images, fps: leave it out"
    ) as refused:
        refuse_unused(params, ("prompt", "seed"))
    assert refused.value.code == "invalid_request"
