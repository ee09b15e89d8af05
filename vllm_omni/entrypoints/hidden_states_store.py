# SPDX-License-Identifier: Apache-2.0
"""`HiddenStatesStore`: stores the hidden states of finished HTTP requests until the client fetches
them.

The store's size and the age of its entries are limited. A completion's hidden states are returned
only once, and only to the API key that requested them. Entries are identified by the id of vLLM's
response. If a request has several prompts, its entry ids end with `-0`, `-1` and so on. This module
depends on neither HTTP nor the engine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

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


Key = tuple[str, str]
"""Entry key: `(principal, request id)`. Clients choose request ids, so two API keys may use the
same id.
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
        self._entries: dict[Key, _Entry] = {}
        self._running: dict[Key, int] = {}
        """Number of requests in progress, by key. Concurrent requests may have the same id, because
        clients choose it.
        """
        self.nbytes = 0

    def open_request(self, request_id: str, principal: str = "") -> None:
        """Record that a request has started.

        Args:
            request_id: Id of the request.
            principal: The client's principal, derived from its API key.
        """
        key = principal, request_id
        self._running[key] = self._running.get(key, 0) + 1

    def end(
        self,
        request_id: str,
        completions: dict[int, HiddenStates],
        num_completions: int = 1,
        principal: str = "",
    ) -> None:
        """Store the hidden states of a finished request.

        Expired entries are then dropped, followed by the oldest entries until the store is within
        its size limit.

        Args:
            request_id: Id of the request.
            completions: Hidden states by completion index. A completion may have no hidden states.
            num_completions: Number of completions per prompt (the request's `n`).
            principal: The client's principal, derived from its API key.
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
        if any(owner == principal and _belongs(name, response_id) for owner, name in self._running):
            raise RequestFailed(
                "not_finished",
                f"{response_id!r} is still running: fetch its hidden states after its response",
            )
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
            f"there are no hidden states of choice {index} of {response_id!r}: it did not request "
            "them, it has none (a response of one token has no `generated` hidden states), or they "
            "were fetched already, have expired or were dropped for newer ones",
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
    """Return whether a request id belongs to a response id.

    Only the completions route appends the prompt index to the request id.
    """
    prefix, _, number = request_id.rpartition("-")
    numbered = response_id.startswith("cmpl-") and prefix == response_id and number.isdigit()
    return request_id == response_id or numbered


def _prompt_number(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])
