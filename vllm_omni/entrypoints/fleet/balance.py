# SPDX-License-Identifier: Apache-2.0
"""`plan_moves`: plans which sessions to move to which servers. All functions in this module are
pure.

Servers are sorted by their number of sessions, with the fullest server first. The plan uses only as
many servers as the requested fill level requires, and moves sessions away from the remaining
servers and from servers that must be emptied. An empty server is therefore used last. On the
servers in use, active sessions are balanced first, because they share GPU time. Idle sessions are
balanced second, because they only occupy memory.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

PLAYING_S: Final = 3.0
"""Time in seconds for which a session counts as active after its last request."""


@dataclass(frozen=True)
class MovableSession:
    """A session that can be moved."""

    name: str
    """The client's id for the session."""
    principal: str
    """Owner of the session."""
    idle_s: float
    """Time in seconds since the last request. Idle sessions are moved first, because no client is
    waiting for them.
    """

    @property
    def plays(self) -> bool:
        """Whether the session is active, that is, whether it has had a request within
        `PLAYING_S`.
        """
        return self.idle_s < PLAYING_S


@dataclass(frozen=True)
class ServerLoad:
    """A server that accepts sessions, and its current sessions."""

    name: str
    """Name of the server."""
    max_sessions: int
    """Maximum number of sessions."""
    sessions: tuple[MovableSession, ...]
    """Sessions on the server."""


@dataclass(frozen=True)
class PlannedMove:
    """A planned move of one session."""

    session: MovableSession
    """Session to move."""
    source: str
    """Name of the server that the session leaves."""
    target: str
    """Name of the server that receives the session."""


def plan_moves(
    servers: Sequence[ServerLoad], to_empty: Collection[str], fill: float, most: int
) -> list[PlannedMove]:
    """Return the next moves, most urgent first.

    Args:
        servers: Servers that accept sessions.
        to_empty: Names of servers that must be emptied.
        fill: Fraction of `max_sessions` to fill on one server before the next server is used. 0:
            all servers are used.
        most: Maximum number of moves.
    """
    plan = _Plan(servers)
    used = _used(servers, to_empty, fill)
    outside = [server.name for server in servers if server.name not in used]
    # Start with the servers that must be emptied, and continue with the fullest.
    outside.sort(key=lambda name: (name not in to_empty, -len(plan.left[name]), name))
    for source in outside:
        while len(plan.moves) < most and plan.left[source] and (targets := plan.with_room(used)):
            plan.move(plan.left[source][0], source, min(targets, key=plan.load))
    for plays in (True, False):
        while len(plan.moves) < most and plan.even_out(used, plays):
            pass
    return plan.moves


class _Plan:
    """The planned moves, and the sessions that each server has after them.

    Args:
        servers: The servers and their sessions before the moves.
    """

    def __init__(self, servers: Sequence[ServerLoad]) -> None:
        self.moves: list[PlannedMove] = []
        self.left = {
            server.name: sorted(server.sessions, key=lambda session: -session.idle_s)
            for server in servers
        }
        self._room = {server.name: server.max_sessions for server in servers}

    def with_room(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if len(self.left[name]) < self._room[name]]

    def load(self, name: str) -> tuple[float, float, str]:
        """Return a server's sort key: the fractions of its capacity that active sessions and all
        sessions use.
        """
        return self._share(name, True), self._share(name, False), name

    def _share(self, name: str, plays: bool, more: int = 0) -> float:
        """Return the fraction of a server's capacity that its active sessions (if `plays` is set)
        or all its sessions use.
        """
        counted = sum(session.plays or not plays for session in self.left[name])
        return (counted + more) / self._room[name]

    def move(self, session: MovableSession, source: str, target: str) -> None:
        self.left[source].remove(session)
        self.left[target].append(session)
        self.moves.append(PlannedMove(session, source, target))

    def even_out(self, names: Sequence[str], plays: bool) -> bool:
        """Plan one move, of an active session if `plays` is set and of an idle session otherwise.
        Return False if no move would improve the balance.
        """
        sources = [name for name in names if any(s.plays == plays for s in self.left[name])]
        targets = self.with_room(names)
        if not sources or not targets:
            return False
        source = max(sources, key=lambda name: (self._share(name, plays), name))
        target = min(targets, key=lambda name: (self._share(name, plays), name))
        # A move must not make the target fuller than the source.
        if self._share(target, plays, 1) > self._share(source, plays, -1):
            return False
        self.move(next(s for s in self.left[source] if s.plays == plays), source, target)
        return True


def _used(servers: Sequence[ServerLoad], to_empty: Collection[str], fill: float) -> list[str]:
    """Return the names of the servers that remain in use."""
    usable = [server for server in servers if server.name not in to_empty]
    usable.sort(key=lambda server: (-len(server.sessions), server.name))
    if not fill:
        return [server.name for server in usable]
    total = sum(len(server.sessions) for server in servers)
    used: list[str] = []
    held = 0
    for server in usable:
        if used and held >= total:
            break
        used.append(server.name)
        held += max(1, math.floor(fill * server.max_sessions))
    return used
