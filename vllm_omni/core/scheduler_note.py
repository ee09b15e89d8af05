# SPDX-License-Identifier: Apache-2.0
"""`SchedulerNote`: message of the scheduler to the runner about one request, beside stock vLLM's fields.

Messages back are `StepOutput`s. It travels in the request's own `PoolingParams.extra_kwargs`, under a key that clients
cannot set: the scheduler removes their value. Held by tests/core/test_stream_batch_scheduler.py.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from vllm import PoolingParams

_KEY = "omni_scheduler"


class SchedulerNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """refused: why this request is not served (it ends with `capacity`). degradations: to apply to its chunk."""

    refused: str | None = None
    degradations: list[str] = []

    @classmethod
    def read(cls, extra_kwargs: Mapping[str, Any] | None) -> "SchedulerNote":
        """Return the note of a request; an empty one if there is none."""
        return msgspec.convert((extra_kwargs or {}).get(_KEY, {}), cls)

    def attach(self, params: "PoolingParams") -> "PoolingParams":
        """Return a copy of `params` with this note; the client's object stays as it is."""
        noted = copy.copy(params)
        noted.extra_kwargs = {**(params.extra_kwargs or {}), _KEY: msgspec.to_builtins(self)}
        return noted


def without_note(params: "PoolingParams") -> "PoolingParams":
    """Return `params` without a client's own value under the note's key."""
    if not params.extra_kwargs or _KEY not in params.extra_kwargs:
        return params
    bare = copy.copy(params)
    bare.extra_kwargs = {key: value for key, value in params.extra_kwargs.items() if key != _KEY}
    return bare
