# SPDX-License-Identifier: Apache-2.0
"""`plan_moves` decides which sessions to move between servers."""

from collections import Counter

import pytest

from vllm_omni.entrypoints.fleet.balance import MovableSession, ServerLoad, plan_moves


def load(name: str, num_sessions: int, max_sessions: int = 8, playing: int = 0) -> ServerLoad:
    """Return the load of a server whose first `playing` sessions are playing. The remaining
    sessions are idle, and the last session has been idle the longest.
    """
    sessions = (
        MovableSession(f"{name}{i}", "anonymous", 0.1 if i < playing else 60.0 + i)
        for i in range(num_sessions)
    )
    return ServerLoad(name, max_sessions, tuple(sessions))


@pytest.mark.parametrize(
    ("before", "to_empty", "fill", "after"),
    [
        ((6, 0, 0), (), 0.0, (2, 2, 2)),  # evenly spread
        ((3, 2, 2), (), 0.0, (3, 2, 2)),  # a difference of one remains
        ((4, 2, 0), ("a",), 0.0, (0, 3, 3)),  # a server is emptied
        ((4, 3, 1), (), 1.0, (8, 0, 0)),  # all fit on one server
        ((7, 1, 4), (), 0.5, (4, 4, 4)),  # three servers, each half full
        ((5, 1, 2), (), 0.5, (4, 0, 4)),  # the server with the fewest sessions is not needed
        ((8, 8, 8), ("b",), 0.0, (8, 8, 8)),  # no room
        ((8, 8, 5), ("b",), 0.0, (8, 5, 8)),  # as far as the capacity allows
        ((0, 0, 0), (), 0.8, (0, 0, 0)),
    ],
)
def test_sessions_are_spread(
    before: tuple[int, ...], to_empty: tuple[str, ...], fill: float, after: tuple[int, ...]
) -> None:
    """All planned moves together result in the expected number of sessions per server. A plan
    computed after these moves is empty.
    """
    names = "abc"
    servers = [load(name, number) for name, number in zip(names, before, strict=True)]
    counts = Counter(dict(zip(names, before, strict=True)))
    for move in plan_moves(servers, to_empty, fill, 100):
        counts[move.source] -= 1
        counts[move.target] += 1
        assert counts[move.target] <= 8
    assert tuple(counts[name] for name in names) == after
    settled = [load(name, number) for name, number in zip(names, after, strict=True)]
    assert plan_moves(settled, to_empty, fill, 100) == []


def test_a_round_is_bounded_and_the_idlest_session_moves_first() -> None:
    moves = plan_moves([load("a", 6), load("b", 0)], (), 0.0, 2)
    assert [move.session.name for move in moves] == ["a5", "a4"]


def test_large_servers_take_more_sessions() -> None:
    moves = plan_moves([load("a", 9, 12), load("b", 0, 4)], (), 0.0, 100)
    assert len(moves) == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((6, 6), (6, 0), (6, 3)), ((6, 3), (6, 3), (6, 3))),  # equal totals, unequal playing
        (((6, 2), (3, 2), (0, 0)), ((3, 2), (3, 1), (3, 1))),  # idle sessions move too
        (((3, 3), (3, 2), (3, 2)), ((3, 3), (3, 2), (3, 2))),  # a difference of one remains
        (((8, 0), (8, 8)), ((8, 0), (8, 8))),  # no room
    ],
)
def test_sessions_that_play_are_evened_out_first(
    before: tuple[tuple[int, int], ...], after: tuple[tuple[int, int], ...]
) -> None:
    """Servers are first balanced by the number of playing sessions. Each pair is a server's
    (sessions, playing sessions), before and after rounds of one move each.
    """
    servers = {
        name: load(name, number, 8, playing)
        for name, (number, playing) in zip("abc", before, strict=False)
    }
    for _ in range(20):
        for move in plan_moves(list(servers.values()), (), 0.0, 1):
            for name in (move.source, move.target):
                sessions = set(servers[name].sessions) ^ {move.session}
                servers[name] = ServerLoad(name, 8, tuple(sessions))
    found = tuple(
        (len(server.sessions), sum(s.plays for s in server.sessions)) for server in servers.values()
    )
    assert found == after
