# SPDX-License-Identifier: Apache-2.0
"""`kill -9` of either server while sessions move, and SIGTERM to a server whose sessions move away.

A session is never live on two servers. If it is live on no server, its last snapshot is on disk.
"""

import asyncio
import contextlib
import json
import random
import threading
from pathlib import Path

import psutil
import pytest
from helpers.fake_engine import FIRST, LATER, camera
from helpers.fleets import TestFleet, live_sessions, migrate
from helpers.haproxy import needs_haproxy, running_proxy
from helpers.scripts import load_script
from helpers.served import AUTHORIZED, family
from helpers.waits import pause, seconds, wait_until
from session_calls import call, request, signatures

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

ROLLING_RESTART = Path(__file__).parents[3] / "benchmarks" / "rolling_restart.py"
KILLS = 4
"""Number of kills in each test. benchmarks/moves.py uses more."""


def snapshots(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in (".withheld", ".safetensors")]


@pytest.mark.parametrize("is_shared", [False, True], ids=["sent", "shared"])
@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_killed_server_leaves_the_session_on_one_side_or_its_snapshot(
    null_world: Path, tmp_path: Path, victim: str, is_shared: bool
) -> None:
    """One of the two servers is killed at a random moment while a session moves from `a` to `b`,
    and is then restarted.

    If the servers share a directory, the move leaves no file in it.
    """
    kept = {name: tmp_path / f"kept-{name}" for name in "ab"}
    shared = tmp_path / "shared"
    fleet = TestFleet(null_world, tmp_path, started="", shared_dir=shared if is_shared else None)
    try:
        for name in "ab":
            fleet.start(name, drain_snapshot_dir=str(kept[name]), snapshot_period_s=0.1)
        for name in "ab":
            fleet[name].wait_until_healthy()
        chance = random.Random(7)
        for number in range(KILLS):
            session_id = f"{victim}-{number}"
            with fleet["a"].client() as client:
                client.send(request(FIRST, session_id=session_id))
                client.frames()
                wait_until(lambda: len(snapshots(kept["a"])) > 0)
                moving = threading.Thread(target=migrate_quietly, args=(fleet, session_id))
                moving.start()
                pause(chance.uniform(0.0, 0.03))
                kill_server(fleet, victim)
                moving.join()
            fleet.start(victim, drain_snapshot_dir=str(kept[victim]), snapshot_period_s=0.1)
            fleet[victim].wait_until_healthy()
            pause(12)  # longer than a move may take
            live = [name for name in "ab" if session_id in live_sessions(fleet[name])]
            assert len(live) <= 1, live
            assert not list(shared.glob("*.safetensors"))
            if not live:
                assert [path for name in "ab" for path in snapshots(kept[name])]
            for name in live:
                with fleet[name].client() as client:
                    client.send(request(LATER, session_id=session_id, image=None))
                    assert signatures(client.frames())[0][0] == FIRST
                    client.request({"endpoint": "close", "session_id": session_id})
            for name in "ab":
                for path in snapshots(kept[name]):
                    path.unlink(missing_ok=True)
    finally:
        fleet.stop()


def migrate_quietly(fleet: TestFleet, session_id: str) -> None:
    with contextlib.suppress(OSError):  # the server was killed
        migrate(fleet["a"], session_id, "b")


def kill_server(fleet: TestFleet, name: str) -> None:
    """Kill the API server and then its engine, which would otherwise shut down by itself."""
    server = fleet[name]
    children = family(server)
    psutil.Process(server.process.pid).kill()
    server.process.wait(seconds(10))
    for child in children:
        if child.is_running():
            child.kill()
    psutil.wait_procs(children, timeout=seconds(10))


def test_a_rolling_restart_moves_every_session(null_world: Path, tmp_path: Path) -> None:
    """After SIGTERM, a server moves a playing session and an idle session to the other server,
    which continues them bit for bit. Nothing is written to disk.
    """
    kept = tmp_path / "kept"
    fleet = TestFleet(null_world, tmp_path, omni={"drain_snapshot_dir": str(kept)})
    path = camera(FIRST + 4 * LATER)
    try:
        a, b = fleet["a"], fleet["b"]
        with b.client() as expected:
            expected.send(request(session_id="expected", cameras=path))
            whole = signatures(expected.frames())
            expected.request({"endpoint": "close", "session_id": "expected"})
        walker, idler = a.client(), a.client()
        idler.send(request(FIRST, session_id="idle"))
        idler.frames()
        walker.send(request(session_id="walk", cameras=path, options={"step_ms": 150.0}))
        frames = [walker.receive()]
        a.process.terminate()
        while (message := walker.receive())["type"] == "frame":
            frames.append(message)
        assert (message["type"], message["server"]) == ("moved", "b")
        assert idler.receive()["type"] == "moved"
        assert a.process.wait(seconds(20)) == 0
        assert live_sessions(b) == {"walk", "idle"}
        assert not list(kept.glob("*.safetensors"))
        with b.client() as client:
            rest = {**path, "poses": path["poses"][FIRST + LATER * (len(frames) - 1) :]}
            client.send(request(session_id="walk", cameras=rest, image=None))
            assert signatures(frames) + signatures(client.frames()) == whole
            client.send(request(LATER, session_id="idle", image=None))
            assert signatures(client.frames())[0][0] == FIRST
        # If no other server has capacity, a session is saved to disk.
        b.process.terminate()
        assert b.process.wait(seconds(20)) == 0
        assert len(list(kept.glob("*.safetensors"))) == 2
    finally:
        fleet.stop()


class Restartable:
    """A wrapper that lets the benchmark restart the servers of a `TestFleet`."""

    def __init__(self, fleet: TestFleet) -> None:
        self._fleet, self.ports = fleet, fleet.ports

    def drain(self, name: str) -> float:
        process = self._fleet[name].process
        process.terminate()
        assert process.wait(seconds(60)) == 0
        return 0.0

    def start(self, name: str) -> None:
        self._fleet.start(name).wait_until_healthy()


@needs_haproxy
def test_played_streams_survive_a_rolling_restart_behind_haproxy(
    null_world: Path, tmp_path: Path
) -> None:
    """While three servers are stopped and restarted one after another, no stream ends, every chunk
    arrives once, and no client waits longer than two seconds. The test plays six streams, whereas
    the benchmark plays 24.
    """
    benchmark = load_script(ROLLING_RESTART)
    fleet = TestFleet(null_world, tmp_path, names="abc")
    try:
        addresses = {name: f"127.0.0.1:{port}" for name, port in fleet.ports.items()}
        with running_proxy(tmp_path, addresses) as proxy:
            proxy.wait_until_checked(3)
            playing = benchmark.measure(Restartable(fleet), proxy.port, 6, 1.0, AUTHORIZED)
            seen = asyncio.run(playing)
    finally:
        fleet.stop()
    assert seen["lost"] == []
    assert seen["wrong_chunks"] == 0
    assert seen["moves"] >= 6
    assert seen["longest_gap_of_a_session_ms"]["max"] <= 1e3 * seconds(2.0)


def test_a_server_that_drains_takes_no_session(null_world: Path, tmp_path: Path) -> None:
    """A draining server accepts no sessions from other servers: a session that is to move there
    stays on its own server, and the operator gets an error.
    """
    fleet = TestFleet(null_world, tmp_path)
    try:
        a, b = fleet["a"], fleet["b"]
        with a.client() as client, b.client() as busy:
            client.send(request(FIRST, session_id="stays"))
            client.frames()
            path = camera(FIRST + LATER)
            busy.send(request(session_id="slow", cameras=path, options={"step_ms": 1500.0}))
            pause(0.5)
            b.process.terminate()
            wait_until(lambda: call(b, "GET", "/omni/ready")[0] == 503)
            status, reply = migrate(a, "stays", "b")
            assert (status, reply["error"]["code"]) == (502, "move_failed"), json.dumps(reply)
            client.send(request(LATER, session_id="stays", image=None))
            assert signatures(client.frames())[0][0] == FIRST
    finally:
        fleet.stop()
