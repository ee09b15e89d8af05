# SPDX-License-Identifier: Apache-2.0
"""A real server with more sessions than fit in memory (`omni.suspend_dir`)."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_engine import FIRST, LATER
from helpers.fleets import end_session
from helpers.served import Served, family, mortal_servers
from helpers.waits import wait_until
from session_calls import call, request, signatures

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NAMES = ("one", "two", "three")


def ready(server: Served) -> dict[str, Any]:
    """Return the readiness reply once it counts all sessions. The counts in the server's reply may
    be a few seconds old.
    """
    reply: dict[str, Any] = {}

    def is_complete() -> bool:
        reply.update(json.loads(call(server, "GET", "/omni/ready")[1]))
        return bool(reply["sessions"] == len(NAMES))

    wait_until(is_complete)
    return reply


def play_in_turn(client: Any) -> dict[str, list[tuple[int, int]]]:
    """Play two chunks of each of three sessions, alternating between the sessions, and return their
    frames.
    """
    played: dict[str, list[tuple[int, int]]] = {name: [] for name in NAMES}
    for num_frames, fields in ((FIRST, {}), (LATER, {"image": None})):
        for name in NAMES:
            prompt = f"a path of {name}"
            client.send(request(num_frames, session_id=name, prompt=prompt, **fields))
            played[name] += signatures(client.frames())
    return played


def test_sessions_come_back_from_disk_by_themselves(null_world: Path, tmp_path: Path) -> None:
    """If only one session fits on the device and none fits in host memory, suspended sessions are
    restored from disk automatically. A killed server leaves no file.
    """
    disk = tmp_path / "disk"
    with mortal_servers(null_world, tmp_path, {}) as start:
        roomy = start()
        with roomy.client() as client:
            whole = play_in_turn(client)
            nbytes = ready(roomy)["bytes"] // len(NAMES)
        assert len({str(frames) for frames in whole.values()}) == len(NAMES)
        tight = start(
            suspend_idle_s=0.0,
            suspend_dir=str(disk),
            max_suspended_bytes=1,
            max_session_bytes=nbytes,
        )
        with tight.client() as client:
            assert play_in_turn(client) == whole
            reply = ready(tight)
            assert (reply["sessions"], reply["on_disk"], reply["bytes"]) == (3, 2, nbytes)
            assert reply["disk_bytes"] > 0 and reply["suspended"] == 0
            end_session(client, "one")
        for process in (*family(tight), tight.process):
            process.kill()
        assert list(disk.iterdir()) == []
