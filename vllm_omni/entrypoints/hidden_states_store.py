# SPDX-License-Identifier: Apache-2.0
"""`HiddenStatesStore`: stores the hidden states of finished HTTP requests until the client fetches
them.

The store's size and the age of its entries are limited. A completion's hidden states are returned
only once, and only to the API key that requested them. Entries are identified by the id of vLLM's
response and the number of the prompt in the request. This module depends on neither HTTP nor the
engine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from vllm_omni.hidden_states import HiddenStates
from vllm_omni.outputs import RequestFailed


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the stored hidden states in one API server process.

    Each field is set by the environment variable named `VLLM_OMNI_` followed by the field name in
    upper case.
    """

    hidden_states_store_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1 << 30
    """Maximum total size, in bytes, of the stored hidden states. The oldest hidden states are
    dropped first. Default: 1 GiB.
    """
    hidden_states_expiry_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 120.0
    """Time in seconds after which hidden states that were not fetched are dropped. Default: 120."""


class EntryKey(NamedTuple):
    """Identifies what the engine generates for one prompt of an HTTP request."""

    response_id: str
    """Id of the response that the client receives."""
    prompt_number: int = 0
    """Number of the prompt in the HTTP request, counted from 0."""
    principal: str = ""
    """The client's principal, derived from its API key. Clients choose request ids, so two API keys
    may use the same id.
    """


@dataclass
class _Entry:
    expires_at: float
    """Monotonic time in seconds at which the entry is dropped."""
    completions: dict[int, HiddenStates]
    """Hidden states that have not been fetched yet, by completion index."""
    num_completions: int
    """Number of completions for the prompt, with or without hidden states."""

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self.completions.values())


class HiddenStatesStore:
    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: dict[EntryKey, _Entry] = {}
        self._running: dict[EntryKey, int] = {}
        """Number of prompts in progress, by key. Concurrent requests may have the same id, because
        clients choose it.
        """
        self.nbytes = 0

    def open_request(self, key: EntryKey) -> None:
        """Record that the engine has started to generate for a prompt."""
        self._running[key] = self._running.get(key, 0) + 1

    def end(
        self, key: EntryKey, completions: dict[int, HiddenStates], num_completions: int = 1
    ) -> None:
        """Store the hidden states of a prompt whose completions are finished.

        Expired entries are then dropped, followed by the oldest entries until the store is within
        its size limit.

        Args:
            key: Key that was passed to `open_request`.
            completions: Hidden states by completion index. A completion may have no hidden states.
            num_completions: Number of completions per prompt (the request's `n`).
        """
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
        """Return the hidden states of one choice and remove them from the store.

        Args:
            response_id: Id of the response.
            index: Index of the choice.
            principal: The client's principal, derived from its API key.

        Raises:
            RequestFailed: `not_finished` if the request is still running, or `not_found` if no
                hidden states are stored for the choice.
        """
        self.drop_expired()
        if any(_belongs(key, response_id, principal) for key in self._running):
            raise RequestFailed(
                "not_finished",
                f"{response_id!r} is still running: fetch its hidden states after its response",
            )
        for key in [key for key in self._entries if _belongs(key, response_id, principal)]:
            entry = self._entries[key]
            first = key.prompt_number * entry.num_completions
            states = entry.completions.pop(index - first, None)
            if states is not None:
                self.nbytes -= states.nbytes
                if not entry.completions:
                    self._drop(key)
                return states
        raise RequestFailed(
            "not_found",
            f"there are no hidden states of choice {index} of {response_id!r}: it did not request "
            "them, it has none (a response of one token has no `generated` hidden states), or they "
            "were fetched already, have expired or were dropped for newer ones",
        )

    def drop_expired(self) -> None:
        now = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.expires_at <= now]:
            self._drop(key)

    def _drop(self, key: EntryKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes


def _belongs(key: EntryKey, response_id: str, principal: str) -> bool:
    return key.response_id == response_id and key.principal == principal
