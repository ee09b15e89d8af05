# SPDX-License-Identifier: Apache-2.0
"""`kill -9` of a real `vllm serve --omni` with `omni.snapshot_period_s`: the next server goes on
within one checkpoint.

The nightly loop kills each kind of process `VLLM_OMNI_KILLS` times (1); it prints what it saw
(`pytest -s`) and, with `VLLM_OMNI_KILLS_JSON` set, writes it there.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.fake_engine import FIRST, LATER, camera
from helpers.served import Served, family, mortal_servers
from helpers.waits import seconds, wait_until
from session_calls import request, signatures
from test_death_served import MP, disk, gone_after
from websockets.exceptions import ConnectionClosed

from vllm_omni.runtime.exit_codes import ENGINE_DIED
from vllm_omni.sessions.snapshot import read_header

__all__ = ["disk"]

CHECKPOINT_S = 0.2
KILLED = -9
SLOW = {"step_ms": 60.0}
CHUNKS = 9  # as many as one request may ask for
KILLS = int(os.environ.get("VLLM_OMNI_KILLS", "1"))  # of each kind; twenty take half an hour

Start = Callable[..., Served]


@pytest.fixture
def retained(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def start(null_world: Path, tmp_path: Path, retained: Path) -> Iterator[Start]:
    defaults = {"drain_snapshot_dir": str(retained), "snapshot_period_s": CHECKPOINT_S}
    with mortal_servers(null_world, tmp_path, defaults) as start:
        yield start


def checkpoints(folder: Path) -> dict[str, int]:
    """Session id -> its next chunk, as files say."""
    found = {}
    for path in folder.glob("*.session.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
            header = read_header(path)
            assert header.owner is not None
            found[header.owner["session_id"]] = header.chunk_index
    return found


def victim_of(server: Served, kind: str) -> psutil.Process:
    if kind == "server":
        return psutil.Process(server.process.pid)
    return next(child for child in family(server) if kind in " ".join(child.cmdline()))


def walk(client: Any, frames: list[dict[str, Any]], until_s: float) -> tuple[str, float]:
    """Take frames until the connection ends: what was said last (`code` of an error, or ""), and
    when.
    """
    said = ""
    with contextlib.suppress(ConnectionClosed):
        while time.monotonic() < until_s:
            message = client.receive()
            if message["type"] == "frame":
                frames.append(message)
            elif message["type"] == "error":
                said = message["code"]
    return said, time.monotonic()


def rest_of(path: dict[str, Any], chunk: int) -> dict[str, Any]:
    return {**path, "poses": path["poses"][FIRST + LATER * (chunk - 1) :]}


@pytest.mark.parametrize(
    "kind",
    [
        "server",
        pytest.param("EngineCore", marks=pytest.mark.nightly),
        pytest.param("Worker", marks=pytest.mark.nightly),
    ],
)
def test_a_walk_continues_after_kill_9_and_a_restart(
    start: Start, retained: Path, kind: str
) -> None:
    """Frames from the checkpoint on are those of a walk that was never cut; an idle session is
    there, too.

    The client is told the chunk at which its world resumes, although it had seen later ones. A
    worker has a process of its own only where that is killed: starting one takes seconds.
    """
    path, processes = camera(FIRST + (CHUNKS - 1) * LATER), MP if kind == "Worker" else ()
    first = start(*processes)
    idler, walker = first.client(), first.client()
    idler.send(request(FIRST, session_id="idle"))
    idler.frames()
    wait_until(lambda: checkpoints(retained) == {"idle": 1})
    walker.send(request(session_id="walk", cameras=path, options=SLOW))
    frames = []
    while checkpoints(retained).get("walk", 0) < 3:
        frames.append(walker.receive())
    assert all(
        file.stat().st_mode & 0o777 == 0o600 for file in retained.glob("*.session.safetensors")
    )
    others = family(first)
    killed_s = time.monotonic()
    victim_of(first, kind).kill()
    walk(walker, frames, killed_s + 10)
    assert first.process.wait(seconds(20)) == (KILLED if kind == "server" else ENGINE_DIED)
    gone_after(others, killed_s, 5)
    saved = checkpoints(retained)["walk"]

    second = start(*processes)
    # a second crash would lose nothing either
    assert checkpoints(retained) == {"idle": 1, "walk": saved}
    with second.client() as client:
        resumed = client.request(
            {"endpoint": "resume", "session_id": "walk", "last_chunk_id": len(frames) - 1}
        )
        assert resumed["type"] == "resumed" or resumed["code"] == "resync_required", resumed
        assert resumed["next_chunk_index"] == saved
        client.send(
            request(session_id="walk", cameras=rest_of(path, saved), image=None, options=SLOW)
        )
        whole = signatures(frames)[:saved] + signatures(client.frames())
        assert len(whole) == CHUNKS
        assert whole[saved : len(frames)] == signatures(frames)[saved:]
    with second.client() as client:
        client.send(request(LATER, session_id="idle", image=None))
        assert signatures(client.frames())[0][0] == FIRST
        assert client.request({"endpoint": "close", "session_id": "idle"})["type"] == "closed"
    wait_until(lambda: "idle" not in checkpoints(retained))


@pytest.mark.nightly
@pytest.mark.timeout(900 + 600 * KILLS)
def test_every_kind_of_process_is_killed_and_every_restart_resumes(
    start: Start, retained: Path
) -> None:
    """Exit status as documented, clients told within a second, no orphan after 5 s, the next server
    where it was.

    The server that is started after one kill suffers the next. `VLLM_OMNI_KILLS` sets another
    number of kills.
    """
    kinds = ("EngineCore", "Worker", "server")
    seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    late: list[tuple[int, str, float]] = []
    server = start(*MP)
    for number in range(KILLS * len(kinds)):
        kind, name = kinds[number % len(kinds)], f"walk{number}"
        client, silent = server.client(), server.client()
        client.send(
            request(session_id=name, cameras=camera(FIRST + (CHUNKS - 1) * LATER), options=SLOW)
        )
        frames: list[dict[str, Any]] = []
        while checkpoints(retained).get(name, 0) < 2:
            frames.append(client.receive())
        others, killed_s, killed_at_s = family(server), time.monotonic(), time.time()
        victim_of(server, kind).kill()
        with ThreadPoolExecutor(1) as thread:
            alongside = thread.submit(walk, silent, [], killed_s + 10)
            code, reported_s = walk(client, frames, killed_s + 10)
            _, silent_reported_s = alongside.result()
        status = server.process.wait(seconds(20))
        assert (status, code) == (
            (KILLED, "") if kind == "server" else (ENGINE_DIED, "engine_error")
        )
        gone_s = gone_after(others, killed_s, 5)
        (file,) = (
            path for path in retained.glob("*.session.safetensors") if owner_of(path) == name
        )
        saved, age_s = checkpoints(retained)[name], killed_at_s - file.stat().st_mtime
        started_s = time.monotonic()
        server = start(*MP)
        restart_s = time.monotonic() - started_s
        with server.client() as again:
            response = again.request(
                {"endpoint": "resume", "session_id": name, "last_chunk_id": len(frames) - 1}
            )
            assert (response.get("code", "resync_required"), response["next_chunk_index"]) == (
                "resync_required",
                saved,
            )
            again.send(request(LATER, session_id=name, image=None))
            assert signatures(again.frames())[0][0] == FIRST + LATER * (saved - 1)
            again.request({"endpoint": "close", "session_id": name})
        reported = max(reported_s, silent_reported_s) - killed_s
        # A killed server says nothing: the system closes its sockets when it has taken its memory
        # apart.
        if reported > (5.0 if kind == "server" else 1.0):
            late.append((number, kind, reported))
        lost = len(frames) - saved
        assert lost <= 2, (kind, lost)  # a chunk lasts longer than CHECKPOINT_S
        seen[kind].append(
            {
                "told_s": reported,
                "gone_s": gone_s,
                "chunks_lost": lost,
                "checkpoint_age_s": age_s,
                "restart_s": restart_s,
            }
        )
        note(seen)
    # at the end: a machine that is busy with other work is slow to tell, and no less right
    assert late == []


def owner_of(path: Path) -> str:
    header = read_header(path)
    assert header.owner is not None
    return header.owner["session_id"]


def note(seen: dict[str, list[dict[str, float]]]) -> None:
    """Print, and write if asked to, what the kills so far have shown."""
    figures = {
        kind: {"kills": len(kills)}
        | {
            name: {
                "median": statistics.median(kill[name] for kill in kills),
                "worst": max(kill[name] for kill in kills),
            }
            for name in kills[0]
        }
        for kind, kills in seen.items()
        if kills
    }
    print(json.dumps(figures))
    if (path := os.environ.get("VLLM_OMNI_KILLS_JSON")) is not None:
        Path(path).write_text(json.dumps({**figures, "each": seen}, indent=2))
