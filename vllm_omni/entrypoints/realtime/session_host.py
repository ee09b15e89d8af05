# SPDX-License-Identifier: Apache-2.0
"""`SessionHost`: the part of `SessionManager` that a `Session` uses."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from vllm_omni.entrypoints.quotas import Quotas
from vllm_omni.entrypoints.realtime.drain import Drainable, SessionDrain
from vllm_omni.entrypoints.realtime.engine import WorldEngine
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.entrypoints.realtime.limits import DoorLimits
from vllm_omni.entrypoints.realtime.run import HeldBytes

SessionKey = tuple[str, str]
"""(principal, session id). The same id of two principals denotes two sessions."""

S = TypeVar("S", bound=Drainable)
T = TypeVar("T")


class SessionHost(Protocol[S]):
    """The session manager as a session uses it. See `SessionManager`."""

    engine: WorldEngine
    facts: WorldFacts
    limits: DoorLimits
    quotas: Quotas
    drain: SessionDrain[S]
    held: HeldBytes

    @property
    def is_over_budget(self) -> bool: ...

    def trim(self) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]: ...

    async def off_loop(self, function: Any, *args: Any) -> Any: ...

    def forget_if_empty(self, session: S) -> None: ...

    def was_evicted(self, key: SessionKey) -> bool: ...

    def close_world(self, engine_id: str) -> None: ...

    def world_ended(self, engine_id: str) -> None: ...

    async def worlds_closed(self) -> None: ...
