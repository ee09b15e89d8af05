# SPDX-License-Identifier: Apache-2.0
"""`SchedulerNote`: message of the scheduler to the runner about one request.

Messages in the other direction are `StepOutput`s. The note travels in the `extra_kwargs` of the
request's `PoolingParams`, under a key that clients cannot set, because the scheduler removes it.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from vllm import PoolingParams

_KEY = "omni_scheduler"


class SchedulerNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Message about one request."""

    refused: str | None = None
    """Reason why the request is refused with `capacity`, if it is."""
    degradations: list[str] = []
    """Degradations to apply to the request's chunk."""

    @classmethod
    def read(cls, extra_kwargs: Mapping[str, Any] | None) -> "SchedulerNote":
        """Return the note of a request, which is empty if the request has none."""
        return msgspec.convert((extra_kwargs or {}).get(_KEY, {}), cls)

    def attach(self, params: "PoolingParams") -> "PoolingParams":
        """Return a copy of `params` with this note. The client's object is not modified."""
        noted = copy.copy(params)
        noted.extra_kwargs = {**(params.extra_kwargs or {}), _KEY: msgspec.to_builtins(self)}
        return noted


def without_note(params: "PoolingParams") -> "PoolingParams":
    """Return `params` without a value that a client has set under the note's key."""
    if not params.extra_kwargs or _KEY not in params.extra_kwargs:
        return params
    bare = copy.copy(params)
    bare.extra_kwargs = {key: value for key, value in params.extra_kwargs.items() if key != _KEY}
    return bare
