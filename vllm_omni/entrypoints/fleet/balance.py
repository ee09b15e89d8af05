# SPDX-License-Identifier: Apache-2.0
"""`plan_moves`: which sessions should move to which server. Pure functions without sockets.

Servers are used in order of their sessions, the fullest first. As many are used as are needed at
the wanted fill. The others, and servers that shall be empty, give their sessions away. A server
without sessions is thus used last. Over the servers that are used, the sessions that play are
evened out first, because they share the time of the GPU, and then the idle ones, which need memory.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

PLAYING_S: Final = 3.0
"""Seconds after its last request for which a session counts as playing."""


@dataclass(frozen=True)
class MovableSession:
    """One session of a server."""

    name: str
    """The client's id of the session."""
    principal: str
    """Owner of the session."""
    idle_s: float
    """Seconds since its last request. Idle sessions move first, because nobody waits for them."""

    @property
    def plays(self) -> bool:
        """Whether the session plays now."""
        return self.idle_s < PLAYING_S


@dataclass(frozen=True)
class ServerLoad:
    """One server that accepts sessions."""

    name: str
    """Name of the server."""
    max_sessions: int
    """Maximum number of sessions."""
    sessions: tuple[MovableSession, ...]
    """Its sessions."""


@dataclass(frozen=True)
class PlannedMove:
    """One move."""

    session: MovableSession
    """The session."""
    source: str
    """Name of its server."""
    target: str
    """Name of the server that it moves to."""


def plan_moves(
    servers: Sequence[ServerLoad], to_empty: Collection[str], fill: float, most: int
) -> list[PlannedMove]:
    """Return the next moves, most urgent first.

    Args:
        servers: Servers that accept sessions.
        to_empty: Names of servers that shall be empty.
        fill: Fraction of `max_sessions` that a server holds before the next one is used. 0: all
            servers are used.
        most: Maximum number of moves.
    """
    plan = _Plan(servers)
    used = _used(servers, to_empty, fill)
    outside = [server.name for server in servers if server.name not in used]
    # those that shall be empty first, then the fullest
    outside.sort(key=lambda name: (name not in to_empty, -len(plan.left[name]), name))
    for source in outside:
        while len(plan.moves) < most and plan.left[source] and (targets := plan.with_room(used)):
            plan.move(plan.left[source][0], source, min(targets, key=plan.load))
    for plays in (True, False):
        while len(plan.moves) < most and plan.even_out(used, plays):
            pass
    return plan.moves


class _Plan:
    """Moves, and the sessions of each server after them.

    Args:
        servers: The servers before the moves.
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
        """Return the shares of a server's room that play and that are used, to compare servers."""
        return self._share(name, True), self._share(name, False), name

    def _share(self, name: str, plays: bool, more: int = 0) -> float:
        """Return the share of a server's room that is used, or used by sessions that play."""
        counted = sum(session.plays or not plays for session in self.left[name])
        return (counted + more) / self._room[name]

    def move(self, session: MovableSession, source: str, target: str) -> None:
        self.left[source].remove(session)
        self.left[target].append(session)
        self.moves.append(PlannedMove(session, source, target))

    def even_out(self, names: Sequence[str], plays: bool) -> bool:
        """Plan one move of a session that plays or of an idle one. Return whether it helps."""
        sources = [name for name in names if any(s.plays == plays for s in self.left[name])]
        targets = self.with_room(names)
        if not sources or not targets:
            return False
        source = max(sources, key=lambda name: (self._share(name, plays), name))
        target = min(targets, key=lambda name: (self._share(name, plays), name))
        # a move must not make the target the fuller one
        if self._share(target, plays, 1) > self._share(source, plays, -1):
            return False
        self.move(next(s for s in self.left[source] if s.plays == plays), source, target)
        return True


def _used(servers: Sequence[ServerLoad], to_empty: Collection[str], fill: float) -> list[str]:
    """Return the names of the servers that hold the sessions."""
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
