# SPDX-License-Identifier: Apache-2.0
"""`/omni/ready` reports whether the server has free capacity, and `/health` reports whether the
engine is alive.
"""

import asyncio
import json
from typing import Any

import pytest
from helpers.waits import until

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.engine.readiness import Readiness
from vllm_omni.model_executor.layers.fast_path import FastPath
from vllm_omni.outputs import RequestFailed

NONE_SUSPENDED = {
    **dict.fromkeys(("suspended", "suspended_bytes", "on_disk", "disk_bytes"), 0),
    "can_suspend": False,
}
STATS = {"sessions": 0, "max_sessions": 2, "bytes": 0, "max_bytes": 100, **NONE_SUSPENDED}


class StatsEngine(OmniEngine):
    """An engine that provides only session statistics."""

    is_dead = False  # type: ignore[assignment]

    def __init__(self, **stats: Any) -> None:
        self.stats = {**STATS, **stats}
        self.other_ranks: list[dict[str, Any]] = []
        self.delay_s = 0.0
        self.requested = 0

    async def session_stats(self) -> list[dict[str, Any]]:
        self.requested += 1
        await asyncio.sleep(self.delay_s)
        if self.is_dead:
            raise RequestFailed("engine_dead", "the engine has stopped")
        return [dict(self.stats), *self.other_ranks]

    async def fast_paths(self) -> list[FastPath]:
        return [FastPath("fp8_attention", "bf16", "cudnn is not installed", "install it")]


def send(
    engine: StatsEngine, has_room: bool = True, can_make_room: bool | None = False, times: int = 1
) -> tuple[int, Any]:
    async def main() -> tuple[int, Any]:
        makes_room = None if can_make_room is None else lambda: bool(can_make_room)
        readiness = Readiness(engine, 60.0, lambda: has_room, makes_room, lambda: 0, lambda: 0)
        for _ in range(times):
            response = await readiness.ready()
        return response.status_code, json.loads(bytes(response.body))

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("stats", "endpoints", "status"),
    [
        ({}, {}, "ready"),
        ({"sessions": 1, "bytes": 50}, {}, "ready"),
        ({"sessions": 1, "bytes": 51}, {}, "capacity"),  # another such session does not fit
        ({"sessions": 1, "bytes": 51, "max_bytes": None}, {}, "ready"),
        # One session is in host memory, and the other can be moved there too.
        ({"sessions": 1, "bytes": 0, "suspended": 1}, {}, "ready"),
        ({"sessions": 3, "bytes": 50, "max_sessions": 9, "on_disk": 2}, {}, "ready"),
        ({"sessions": 1, "bytes": 90, "can_suspend": True}, {}, "ready"),
        ({"sessions": 2, "bytes": 10}, {}, "capacity"),
        ({"sessions": 2, "bytes": 10}, {"can_make_room": True}, "ready"),  # one session is idle
        # A model without sessions queues its requests.
        ({"sessions": 2, "bytes": 10}, {"can_make_room": None}, "ready"),
        ({}, {"has_room": False}, "capacity"),
    ],
)
def test_ready_means_room_for_a_session(
    stats: dict[str, Any], endpoints: dict[str, Any], status: str
) -> None:
    """The status is 200 if and only if a new session would be accepted."""
    code, reply = send(StatsEngine(**stats), **endpoints)
    assert (code, reply["status"]) == (200 if status == "ready" else 503, status)
    assert reply["max_sessions"] == stats.get("max_sessions", STATS["max_sessions"])


def test_ready_lists_the_fast_paths_of_the_engine() -> None:
    """A fast path that is off is listed with the reason."""
    assert send(StatsEngine())[1]["fast_paths"] == [
        {"name": "fp8_attention", "on": False, "reason": "cudnn is not installed"}
    ]


def test_a_dead_engine_is_not_ready() -> None:
    engine = StatsEngine()
    engine.is_dead = True  # type: ignore[misc]
    assert send(engine) == (
        503,
        {
            "status": "engine_dead",
            **dict.fromkeys(
                [*(STATS.keys() - {"can_suspend"}), "age_s", "ranks", "fast_paths", "encoders"]
            ),
        },
    )


def test_probes_do_not_load_the_engine() -> None:
    """A hundred probes cause at most one request to the engine, in addition to the one sent for the
    metrics.
    """
    engine = StatsEngine()
    send(engine, times=100)
    assert engine.requested <= 2


def test_a_long_step_does_not_make_a_server_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long step does not make a server unready. Workers respond only between steps, so a probe
    uses the last known statistics until the step ends.
    """
    monkeypatch.setattr("vllm_omni.entrypoints.engine.readiness._PATIENCE_S", 0.05)
    engine = StatsEngine()
    engine.delay_s = 10.0
    code, reply = send(engine)
    assert (code, reply["sessions"], reply["age_s"]) == (200, None, None)


def test_an_engine_that_dies_during_a_probe_is_reported() -> None:
    """If the engine dies while a probe is waiting, the probe reports the engine's death."""
    engine = StatsEngine()
    engine.delay_s = 0.2

    async def main() -> str:
        readiness = Readiness(engine, 60.0, lambda: True, lambda: False, lambda: 0, lambda: 0)
        probe = asyncio.create_task(readiness.ready())
        await until(lambda: engine.requested)
        engine.is_dead = True  # type: ignore[misc]
        return str(json.loads(bytes((await probe).body))["status"])

    assert asyncio.run(main()) == "engine_dead"


def test_several_ranks_add_up_and_one_with_room_is_enough() -> None:
    """The statistics of all data-parallel ranks are summed. A server with two ranks stays ready if
    only one of them is full.
    """
    engine = StatsEngine(sessions=2, bytes=80)
    engine.other_ranks = [{**STATS, "sessions": 1, "bytes": 40}]
    code, reply = send(engine)
    assert (code, reply["status"]) == (200, "ready")
    assert {name: reply[name] for name in ("sessions", "max_sessions", "bytes", "max_bytes")} == {
        "sessions": 3,
        "max_sessions": 4,
        "bytes": 120,
        "max_bytes": 200,
    }
    assert [rank["sessions"] for rank in reply["ranks"]] == [2, 1]
    engine.other_ranks[0].update(sessions=2, bytes=80)
    assert send(engine)[1]["status"] == "capacity"


def test_a_pipeline_that_keeps_no_sessions_is_ready() -> None:
    status, body = send(
        StatsEngine(sessions=0, max_sessions=0, bytes=0, max_bytes=None), can_make_room=None
    )
    assert (status, body["status"], body["sessions"], body["max_sessions"]) == (200, "ready", 0, 0)
