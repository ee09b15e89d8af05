# SPDX-License-Identifier: Apache-2.0
"""`kill -9` of a real `vllm serve --omni` with `omni.snapshot_period_s`: the next server resumes at
the last periodic snapshot.

The nightly loop kills each kind of process `VLLM_OMNI_KILLS` times (default 1), prints its
measurements (`pytest -s`) and writes them to `VLLM_OMNI_KILLS_JSON` if that variable is set.
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
from vllm_omni.session_files.snapshot import read_header

__all__ = ["disk"]

CHECKPOINT_S = 0.2
KILLED = -9
SLOW = {"step_ms": 60.0}
CHUNKS = 9  # the maximum in one request
KILLS = int(os.environ.get("VLLM_OMNI_KILLS", "1"))  # per kind; 20 take half an hour

Start = Callable[..., Served]


@pytest.fixture
def retained(tmp_path: Path) -> Path:
    return tmp_path / "retained"


@pytest.fixture
def start(null_world: Path, tmp_path: Path, retained: Path) -> Iterator[Start]:
    defaults = {"drain_snapshot_dir": str(retained), "snapshot_period_s": CHECKPOINT_S}
    with mortal_servers(null_world, tmp_path, defaults) as start:
        yield start


def snapshots(folder: Path) -> dict[str, int]:
    """Return {session id: index of its next chunk} for the snapshot files in a folder."""
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
    """Receive frames until the connection ends. Return the last error's code (or "") and the time
    at which the connection ended.
    """
    code = ""
    with contextlib.suppress(ConnectionClosed):
        while time.monotonic() < until_s:
            message = client.receive()
            if message["type"] == "frame":
                frames.append(message)
            elif message["type"] == "error":
                code = message["code"]
    return code, time.monotonic()


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
    """After `kill -9` and a restart, the frames after the snapshot equal those of an uninterrupted
    walk, and an idle session is restored too. The server tells the client at which chunk the
    session resumes.

    The worker runs in a separate process only in the test case that kills it, because starting that
    process takes seconds.
    """
    path, processes = camera(FIRST + (CHUNKS - 1) * LATER), MP if kind == "Worker" else ()
    first = start(*processes)
    idler, walker = first.client(), first.client()
    idler.send(request(FIRST, session_id="idle"))
    idler.frames()
    wait_until(lambda: snapshots(retained) == {"idle": 1})
    walker.send(request(session_id="walk", cameras=path, options=SLOW))
    frames = []
    while snapshots(retained).get("walk", 0) < 3:
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
    saved = snapshots(retained)["walk"]

    second = start(*processes)
    # The restored snapshots stay on disk, so a second crash would not lose them.
    assert snapshots(retained) == {"idle": 1, "walk": saved}
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
    wait_until(lambda: "idle" not in snapshots(retained))


@pytest.mark.nightly
@pytest.mark.timeout(900 + 600 * KILLS)
def test_every_kind_of_process_is_killed_and_every_restart_resumes(
    start: Start, retained: Path
) -> None:
    """After each kill, the exit status is the documented one, clients get an error within a second,
    no process remains after 5 s, and the next server resumes the sessions.

    The server that starts after one kill is the target of the next kill.
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
        while snapshots(retained).get(name, 0) < 2:
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
        saved, age_s = snapshots(retained)[name], killed_at_s - file.stat().st_mtime
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
        # The kernel closes the sockets of a killed server only after it has freed the server's
        # memory.
        if reported > (5.0 if kind == "server" else 1.0):
            late.append((number, kind, reported))
        lost = len(frames) - saved
        assert lost <= 2, (kind, lost)  # a chunk takes longer than CHECKPOINT_S
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
    # Check the delays only at the end, because on a busy machine errors may be late without being
    # lost.
    assert late == []


def owner_of(path: Path) -> str:
    header = read_header(path)
    assert header.owner is not None
    return header.owner["session_id"]


def note(seen: dict[str, list[dict[str, float]]]) -> None:
    """Print the measurements taken so far, and write them to a file if requested."""
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
