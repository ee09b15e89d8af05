# SPDX-License-Identifier: Apache-2.0
"""The scheduler's note on a request leaves the client's fields unchanged."""

from typing import Any

import pytest
from vllm import PoolingParams

from vllm_omni.core.step_protocol import SchedulerNote, without_note


def params(extra: dict[str, Any] | None) -> PoolingParams:
    return PoolingParams(task="plugin", extra_kwargs=extra)


def test_a_note_is_added_to_the_fields_of_the_client() -> None:
    """The scheduler adds the note to a copy of the request's fields and does not change the
    client's object.
    """
    sent = params({"omni": {"session_id": "s"}, "omni_tensors": b"x"})
    noted = SchedulerNote(refused="full", degradations=["fewer_steps"]).attach_to_params(sent)
    assert sent.extra_kwargs == {"omni": {"session_id": "s"}, "omni_tensors": b"x"}
    assert noted.extra_kwargs is not None and noted.task == "plugin"
    assert {key: noted.extra_kwargs[key] for key in sent.extra_kwargs} == sent.extra_kwargs
    assert SchedulerNote.read_extra_kwargs(noted.extra_kwargs) == SchedulerNote(
        refused="full", degradations=["fewer_steps"]
    )
    bare = without_note(noted)
    assert bare.extra_kwargs == sent.extra_kwargs and noted.extra_kwargs != sent.extra_kwargs


@pytest.mark.parametrize("extra", [None, {}, {"omni": {"session_id": "s"}}])
def test_params_without_a_note_are_not_copied(extra: dict[str, Any] | None) -> None:
    """Parameters without a note are not copied, and the note read from them is empty."""
    sent = params(extra)
    assert without_note(sent) is sent and SchedulerNote.read_extra_kwargs(extra) == SchedulerNote()
    noted = SchedulerNote(degradations=["a"]).attach_to_params(sent)
    assert SchedulerNote.read_extra_kwargs(noted.extra_kwargs).degradations == ["a"]
