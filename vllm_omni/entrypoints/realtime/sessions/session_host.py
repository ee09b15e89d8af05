# SPDX-License-Identifier: Apache-2.0
"""`SessionHost`: the part of the session manager's interface that sessions use."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from vllm_omni.entrypoints.limits.quotas import Quotas
from vllm_omni.entrypoints.realtime.connection.drain import DrainableSession, SessionDrain
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.encoding.implementations import Implementations
from vllm_omni.entrypoints.realtime.sessions.run import HeldBytes

SessionKey = tuple[str, str]
"""Session key: `(principal, session id)`. The same id denotes different sessions for different
principals.
"""

T = TypeVar("T")
S = TypeVar("S", bound=DrainableSession)


class SessionHost(Protocol[S]):
    """The part of `SessionManager`'s interface that sessions use."""

    engine: SessionEngine
    """Interface for engine requests."""
    info: StreamInfo
    """Stream metadata of the served model."""
    limits: EndpointLimits
    """Limits on connections and sessions."""
    quotas: Quotas
    """Client quotas."""
    drain: SessionDrain[S]
    """Graceful shutdown state."""
    held: HeldBytes
    """Counter for the total size of the replies that all sessions retain."""
    implementations: Callable[[], Implementations]
    """Function that returns the codec implementations."""

    @property
    def is_over_budget(self) -> bool: ...

    def trim(self) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]: ...

    async def off_loop(self, function: Any, *args: Any) -> Any: ...

    def remove_if_empty(self, session: S) -> None: ...

    def was_evicted(self, key: SessionKey) -> bool: ...

    def close_engine_session(self, engine_id: str) -> None: ...

    def session_left(self, session: S) -> None: ...

    def engine_session_ended(self, engine_id: str) -> None: ...

    async def wait_for_closed_sessions(self) -> None: ...
