# SPDX-License-Identifier: Apache-2.0
"""`plan_moves`: which sessions should move to which server. Pure functions without sockets.

Servers are used in order of their sessions, the fullest first. As many are used as are needed at
the wanted fill, and the sessions are evened out over them. The others, and servers that shall be
empty, give their sessions away. A server without sessions is thus used last.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MovableSession:
    """One session of a server."""

    name: str
    """The client's id of the session."""
    principal: str
    """Owner of the session."""
    idle_s: float
    """Seconds since its last request. Idle sessions move first, because nobody waits for them."""


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
    counts = {server.name: len(server.sessions) for server in servers}
    left = {
        server.name: sorted(server.sessions, key=lambda session: -session.idle_s)
        for server in servers
    }
    room = {server.name: server.max_sessions for server in servers}
    used = _used(servers, to_empty, fill)
    moves: list[PlannedMove] = []
    while len(moves) < most:
        targets = [name for name in used if counts[name] < room[name]]
        if not targets:
            break
        target = min(targets, key=lambda name: (counts[name] / room[name], name))
        outside = [name for name in counts if name not in used and left[name]]
        # those that shall be empty first, then the fullest
        outside.sort(key=lambda name: (name not in to_empty, -counts[name], name))
        if outside:
            source = outside[0]
        else:
            source = max(used, key=lambda name: (counts[name] / room[name], name))
            after = (counts[source] - 1) / room[source]
            # a move must not make the target the fuller one
            if not left[source] or (counts[target] + 1) / room[target] > after:
                break
        session = left[source].pop(0)
        counts[source] -= 1
        counts[target] += 1
        moves.append(PlannedMove(session, source, target))
    return moves


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
