# SPDX-License-Identifier: Apache-2.0
"""`HiddenStatesStore`: hidden states of answered HTTP requests, until their client fetches them.

Owns the bound (bytes and seconds) and the rules that each completion is handed out once, and only to the API key that
made its request. Knows neither HTTP nor the engine. Entries are named by the id under which vLLM's server answered;
several prompts of one request have ids with `-0`, `-1`, ... behind it.
Held by tests/entrypoints/test_hidden_states_store.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from vllm_omni.entrypoints.environment import read_struct
from vllm_omni.hidden_states import HiddenStates
from vllm_omni.outputs import RequestFailed


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one API server process; each is the variable `VLLM_OMNI_` + the field's name in upper case.

    hidden_states_store_bytes: rows kept for clients; beyond it the oldest are dropped.
    hidden_states_expiry_s: rows nobody has fetched by then are dropped.
    """

    hidden_states_store_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1 << 30
    hidden_states_expiry_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 120.0

    @classmethod
    def from_env(cls) -> "StoreLimits":
        """Read the variables that are set; raises ValueError with the variable and the allowed values."""
        return read_struct(cls)


Key = tuple[str, str]
"""(principal, request id): clients may choose request ids, so those of two keys may be equal."""


@dataclass
class _Entry:
    expires_at: float
    completions: dict[int, HiddenStates]
    num_completions: int
    """Of this prompt, whether they have rows or not."""

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self.completions.values())


class HiddenStatesStore:
    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: dict[Key, _Entry] = {}
        self._running: dict[Key, int] = {}
        """Requests that have begun and not ended; two at once may carry the same client-given id."""
        self.nbytes = 0

    def begin(self, request_id: str, principal: str = "") -> None:
        """principal: the client that made the request, by its key."""
        key = principal, request_id
        self._running[key] = self._running.get(key, 0) + 1

    def end(
        self, request_id: str, completions: dict[int, HiddenStates], num_completions: int = 1, principal: str = ""
    ) -> None:
        """Keep a finished request's rows, by completion index; drop expired entries and the oldest over the limit.

        num_completions: `n` of the request; a completion may have no rows.
        """
        key = principal, request_id
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        self._drop(key)
        if completions:
            expires_at = self._clock() + self._limits.hidden_states_expiry_s
            entry = _Entry(expires_at, dict(completions), num_completions)
            self._entries[key] = entry
            self.nbytes += entry.nbytes
        self.drop_expired()
        while self.nbytes > self._limits.hidden_states_store_bytes:
            self._drop(next(iter(self._entries)))

    def fetch(self, response_id: str, index: int, principal: str = "") -> HiddenStates:
        """Hand out, once, the rows of choice `index` of a response to the client that made the request.

        Raises `RequestFailed` with code `not_finished` while it runs and `not_found` for anything else unknown.
        """
        self.drop_expired()
        if any(owner == principal and _belongs(name, response_id) for owner, name in self._running):
            raise RequestFailed("not_finished", f"{response_id!r} is still running: fetch when it has been answered")
        own = [name for owner, name in self._entries if owner == principal]
        for name in [name for name in own if _belongs(name, response_id)]:
            entry = self._entries[principal, name]
            first = 0 if name == response_id else _prompt_number(name) * entry.num_completions
            states = entry.completions.pop(index - first, None)
            if states is not None:
                self.nbytes -= states.nbytes
                if not entry.completions:
                    self._drop((principal, name))
                return states
        raise RequestFailed(
            "not_found",
            f"no hidden states of choice {index} of {response_id!r}: it did not ask for them, it has none (one "
            "generated token alone has no `generated` row), or they were fetched already, have expired, or were "
            "dropped for newer ones",
        )

    def drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.expires_at <= now]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes


def _belongs(request_id: str, response_id: str) -> bool:
    """Whether the engine knows one of the response's prompts as `request_id`: only completions number theirs."""
    prefix, _, number = request_id.rpartition("-")
    numbered = response_id.startswith("cmpl-") and prefix == response_id and number.isdigit()
    return request_id == response_id or numbered


def _prompt_number(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])
