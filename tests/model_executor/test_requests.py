# SPDX-License-Identifier: Apache-2.0
"""Tests of how scheduled requests are parsed, and of which parts of an exception a client may
see.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.core.step_protocol import SchedulerNote
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.requests import RequestState, RequestStates, as_failure
from vllm_omni.outputs import RequestFailed


def scheduled(name: str, params: Any) -> Any:
    """Return vLLM's `NewRequestData` with only the fields that this package reads."""
    return SimpleNamespace(req_id=name, pooling_params=params, mm_features=[], lora_request=None)


def sent(note: SchedulerNote | None = None, **fields: Any) -> Any:
    tensors = fields.pop("tensors", {})
    params = DiffusionParams(session_id="s", **fields).to_pooling_params(tensors)
    return params if note is None else note.attach_to_params(params)


def test_a_request_is_read_with_its_tensors_and_its_note() -> None:
    """A request is parsed together with its tensors and can then be looked up by its id."""
    states = RequestStates()
    poses = torch.arange(3.0)
    state = states.add_request(
        scheduled(
            "r",
            sent(SchedulerNote(degradations=["a", "b"]), prompt="hill", tensors={"poses": poses}),
        )
    )
    assert state.failure is None and state.request_id == "r" and state.params is not None
    assert (state.params.session_id, state.params.prompt) == ("s", "hill")
    assert torch.equal(state.tensors["poses"], poses) and state.degradations == ("a", "b")
    assert states["r"] is states.get("r") is state and list(states.values()) == [state]


def test_a_request_that_the_scheduler_refuses_ends_with_its_reason() -> None:
    state = RequestStates().add_request(
        scheduled("r", sent(SchedulerNote(refused="too many streams")))
    )
    assert state.failure is not None and state.params is None and state.tensors == {}
    assert (state.failure.code, state.failure.message) == ("capacity", "too many streams")


@pytest.mark.parametrize(
    "params", [None, SimpleNamespace(extra_kwargs=None), SimpleNamespace(extra_kwargs={})]
)
def test_a_request_without_fields_fails_alone(params: Any) -> None:
    state = RequestStates().add_request(scheduled("r", params))
    assert state.request_id == "r" and state.params is None and state.tensors == {}
    assert state.failure is not None and state.failure.code == "invalid_request"


def test_an_unreadable_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """If a request cannot be parsed, the client gets a general message, and the log names the
    request and the exception.
    """
    states = RequestStates()
    with caplog.at_level("ERROR", logger="vllm.vllm_omni.model_executor.requests"):
        state = states.add_request(scheduled("r7", SimpleNamespace(extra_kwargs=7)))
    assert (
        state.request_id == "r7"
        and state.params is None
        and state.tensors == {}
        and states["r7"] is state
    )
    assert state.failure is not None
    assert (state.failure.code, state.failure.message) == (
        "invalid_request",
        "the request could not be read",
    )
    (record,) = caplog.records
    assert record.getMessage() == "request r7 could not be read" and record.exc_info is not None


def test_the_progress_of_a_session_is_that_of_its_oldest_unfinished_chunk() -> None:
    """If a session has several chunks in flight, its progress is that of the oldest unfinished
    chunk.
    """
    states = RequestStates()

    def at(name: str, session: str, step: int) -> None:
        state = states.add_request(scheduled(name, sent()))
        state.chunk = SimpleNamespace(
            session=SimpleNamespace(session_id=session), step=step, num_steps=4
        )  # type: ignore[assignment]

    states.add_request(scheduled("waiting", sent()))
    at("s1", "s", 4)
    at("s2", "s", 2)
    at("s3", "s", 1)
    at("t1", "t", 3)
    at("t2", "t", 0)
    at("u1", "u", 4)
    assert states.progress() == {"s": [2, 4], "t": [3, 4], "u": [4, 4]}


@pytest.mark.parametrize(
    ("step", "num_steps", "done"), [(0, 0, False), (3, 4, False), (4, 4, True), (0, 1, False)]
)
def test_a_chunk_is_done_with_its_last_step(step: int, num_steps: int, done: bool) -> None:
    state = RequestState("r", DiffusionParams(session_id="s"), {})
    assert not state.done and not state.is_session_operation
    state.chunk = SimpleNamespace(step=step, num_steps=num_steps)  # type: ignore[assignment]
    assert state.done == done
    assert RequestState("r", DiffusionParams(session_id="s", op="close"), {}).is_session_operation
    assert not RequestState("r", None, {}).is_session_operation


def test_clients_see_only_messages_of_this_package(caplog: pytest.LogCaptureFixture) -> None:
    """Clients receive this package's own error messages verbatim. For any other exception, clients
    receive general advice, and the details are logged.
    """
    own = RequestFailed("capacity", "full")
    assert as_failure(own, "r-1") is own
    memory = as_failure(torch.OutOfMemoryError("at 0x7f00"), "r-1")
    assert (memory.code, memory.message) == (
        "oom",
        "the device ran out of memory on this chunk; the session is unchanged",
    )
    assert caplog.records == []
    with caplog.at_level("ERROR", logger="vllm.vllm_omni.model_executor.requests"):
        try:
            raise KeyError("secret")
        except KeyError as error:
            other = as_failure(error, "r-1")
    assert (other.code, other.message) == (
        "engine_error",
        "the model failed on this chunk; the server's log has the details",
    )
    (record,) = caplog.records
    assert record.getMessage() == "request r-1 failed" and record.exc_info is not None
