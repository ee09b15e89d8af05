# SPDX-License-Identifier: Apache-2.0
"""Periodic snapshots without a server: when a session is saved, when its file is deleted, and which
server restores it.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_engine import FIRST, LATER, FakeEngine
from helpers.waits import pause_task, seconds, until
from test_session import ended, job, scenario

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration
from vllm_omni.entrypoints.realtime.sessions.periodic_snapshots import PeriodicSnapshots
from vllm_omni.entrypoints.realtime.sessions.persisted_sessions import PersistedSessions
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.staging_directory import StagingDirectory
from vllm_omni.model_executor.models.registry import get_family

PERIOD_S = 0.05


class Writer:
    """A simulation of the engine's snapshot writer. It writes the index of the next chunk after
    `delay_s`, or fails.
    """

    def __init__(self, manager: SessionManager) -> None:
        self.manager, self.delay_s, self.cost_s = manager, 0.0, 0.0
        self.saved: list[tuple[str, int]] = []
        self.fails: EndpointError | None = None
        self.is_dead = False
        self.engine = manager.engine
        manager.engine = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def save_session_live(
        self, session_id: str, path: Path, owner: dict[str, str]
    ) -> tuple[Any, float]:
        session = next(each for each in self.manager.sessions() if each.engine_id == session_id)
        chunk = session.next_chunk
        await asyncio.sleep(self.delay_s)
        if self.fails is not None:
            raise self.fails
        path.write_text(str(chunk))
        self.saved.append((owner["session_id"], chunk))
        return SimpleNamespace(chunk_index=chunk), self.cost_s


Test = Callable[[SessionManager, Session, FakeEngine, Writer, PersistedSessions], Awaitable[None]]


def with_snapshots(folder: Path, test: Test) -> None:
    """Run `test` with a manager that writes periodic snapshots to `folder`."""

    async def inner(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        writer = Writer(manager)
        migration = SessionMigration(
            manager, StagingDirectory(folder / "staging"), folder / "retained", PERIOD_S
        )
        assert migration.persistent_dir is not None and isinstance(
            migration.periodic_snapshots, PeriodicSnapshots
        )
        await test(manager, session, engine, writer, migration.persistent_dir)

    scenario(inner)


async def walk(session: Session, number: int) -> None:
    frames = FIRST if number == 0 else LATER
    assert await ended(session.submit(job(frames, f"r{number}", image=number == 0))) is None


def test_a_session_is_saved_after_a_new_chunk_and_its_file_is_deleted_with_it(
    tmp_path: Path,
) -> None:
    """A session has one snapshot file, which is replaced after a new chunk and deleted with the
    session. An unchanged session is not saved again.
    """

    async def test(
        manager: SessionManager,
        session: Session,
        engine: FakeEngine,
        writer: Writer,
        retained: PersistedSessions,
    ) -> None:
        await walk(session, 0)
        file = retained.periodic_path(session.key)
        await until(file.exists)
        await pause_task(4 * PERIOD_S)
        assert writer.saved == [("s", 1)]
        await walk(session, 1)
        await until(lambda: file.read_text() == "2")
        assert [path.name for path in retained.folder.glob("*.safetensors")] == [file.name]
        await session.reset()
        assert not file.exists()

    with_snapshots(tmp_path, test)


def test_a_session_that_ends_during_a_snapshot_leaves_no_file(tmp_path: Path) -> None:
    async def test(
        manager: SessionManager,
        session: Session,
        engine: FakeEngine,
        writer: Writer,
        retained: PersistedSessions,
    ) -> None:
        writer.delay_s = 0.1
        await walk(session, 0)
        await pause_task(2 * PERIOD_S)
        await session.reset()
        await until(lambda: writer.saved)
        await pause_task(PERIOD_S)
        assert not [
            path
            for path in retained.folder.iterdir()
            if path.suffix in (".partial", ".safetensors")
        ]

    with_snapshots(tmp_path, test)


def test_snapshots_of_a_dead_engine_stay(tmp_path: Path) -> None:
    """The snapshots of a dead engine stay on disk, although the endpoints disconnect the clients
    and free their sessions after a crash.
    """

    async def test(
        manager: SessionManager,
        session: Session,
        engine: FakeEngine,
        writer: Writer,
        retained: PersistedSessions,
    ) -> None:
        await walk(session, 0)
        await until(retained.periodic_path(session.key).exists)
        writer.is_dead = True
        session.free_engine_state(in_engine=False)
        assert retained.periodic_path(session.key).exists()

    with_snapshots(tmp_path, test)


def test_a_full_disk_affects_the_snapshot_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the disk is full, the failure is logged once, the previous snapshot stays, and the server
    tries to save the session again in the next period.
    """

    async def test(
        manager: SessionManager,
        session: Session,
        engine: FakeEngine,
        writer: Writer,
        retained: PersistedSessions,
    ) -> None:
        await walk(session, 0)
        file = retained.periodic_path(session.key)
        await until(file.exists)
        writer.fails = EndpointError("storage_full", "there is no room")
        await walk(session, 1)
        await pause_task(6 * PERIOD_S)
        assert file.read_text() == "1"
        writer.fails = None
        await until(lambda: file.read_text() == "2")

    with caplog.at_level("WARNING", "vllm.vllm_omni"):
        with_snapshots(tmp_path, test)
    assert sum("could not be written" in record.message for record in caplog.records) <= 1


def test_snapshots_take_a_bounded_share_of_time(tmp_path: Path) -> None:
    """Snapshots take at most a fixed share of engine time: after a snapshot that took 10 ms of
    engine time, the next snapshot follows at least two thirds of a second later.
    """

    async def test(
        manager: SessionManager,
        session: Session,
        engine: FakeEngine,
        writer: Writer,
        retained: PersistedSessions,
    ) -> None:
        writer.cost_s = 0.01
        started_s = time.monotonic()
        for number in range(8):
            await walk(session, number)
            await pause_task(PERIOD_S)
        lasted_s = time.monotonic() - started_s
        assert 1 <= len(writer.saved) <= 1 + lasted_s / (0.01 / 0.02)

    with_snapshots(tmp_path, test)


def test_a_drain_replaces_the_periodic_snapshot(tmp_path: Path) -> None:
    """A drain saves the session in a file that any server may restore, and deletes the session's
    periodic snapshot.
    """

    async def test(
        manager: SessionManager,
        session: Session,
        engine: FakeEngine,
        writer: Writer,
        retained: PersistedSessions,
    ) -> None:
        async def save(session_id: str, path: Path, owner: dict[str, str]) -> Any:
            path.write_text("for good")
            return SimpleNamespace(chunk_index=1)

        writer.save_session = save  # type: ignore[attr-defined]
        await walk(session, 0)
        await until(retained.periodic_path(session.key).exists)
        async with asyncio.timeout(seconds(5)):
            await manager.drain.drain_sessions(manager)
        assert retained.final_path(session.key).read_text() == "for good"
        assert not retained.periodic_path(session.key).exists()

    with_snapshots(tmp_path, test)


def test_only_files_of_dead_servers_are_restored(tmp_path: Path) -> None:
    """If a session has several snapshot files, the newest is restored. Snapshots of live servers
    stay untouched, and day-old snapshots are deleted.
    """
    living, dead = StagingDirectory(tmp_path), StagingDirectory(tmp_path)
    key, other = ("anonymous", "walk"), ("anonymous", "other")
    mine, theirs = (
        PersistedSessions(tmp_path, living.owner),
        PersistedSessions(tmp_path, dead.owner),
    )
    for age_s, path in enumerate(
        (
            theirs.periodic_path(key),
            theirs.final_path(key),
            mine.periodic_path(other),
            theirs.periodic_path(other),
        )
    ):
        path.write_text("x")
        os.utime(path, (time.time() - age_s - 10,) * 2)
    theirs.partial_path(theirs.periodic_path(key)).write_text("torn")
    assert mine.left_by_others() == [mine.final_path(key)], "the dead one still lives"
    dead.close()
    assert mine.left_by_others() == [theirs.periodic_path(other), theirs.periodic_path(key)]
    assert not mine.final_path(key).exists()
    mine.sweep({dead.owner})
    assert not list(tmp_path.glob("*.partial"))
    os.utime(theirs.periodic_path(other), (time.time() - 100_000,) * 2)
    mine.sweep(set())
    assert mine.left_by_others() == [theirs.periodic_path(key)]
    assert mine.periodic_path(other).exists()


def test_an_entry_that_is_no_snapshot_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory, a FIFO or a file that is not a snapshot is skipped, stays in place, and is named
    in the log.
    """
    retained = tmp_path / "retained"
    retained.mkdir()
    names = [f"{digit * 32}.session.safetensors" for digit in "abc"]
    (retained / names[0]).mkdir()
    os.mkfifo(retained / names[1])
    (retained / names[2]).write_text("x")
    os.mkfifo(retained / "vllm_omni-0123456789abcdef.owner")
    os.mkfifo(retained / f"{'a' * 32}.0123456789abcdef.session.safetensors")

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        migration = SessionMigration(manager, StagingDirectory(tmp_path / "staging"), retained)
        migration.sweep()
        assert await migration.take_over() == 0

    with caplog.at_level("WARNING"):
        scenario(test)
    assert all(f"{name} is not restored" in caplog.text for name in names)
    assert all((retained / name).exists() for name in names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_period_s": 5}, "requires drain_snapshot_dir"),
        ({"snapshot_period_s": 0, "drain_snapshot_dir": "k"}, ">= 0.1"),
    ],
)
def test_periodic_snapshots_require_a_directory_and_a_period(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OmniConfig.from_additional_config({"omni": options})


def test_a_model_without_sessions_refuses_periodic_snapshots() -> None:
    omni = OmniConfig(snapshot_period_s=5, drain_snapshot_dir="kept")
    with pytest.raises(ValueError, match="Lance does not support it, because it has no sessions"):
        get_family("lance").check_refusals({}, omni, 1)


def test_a_cancelled_restore_is_closed_in_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a restore is cancelled, the workers finish their call, so the session that they restore is
    closed.
    """

    async def accept(self: SessionMigration, path: Path) -> None:
        return

    monkeypatch.setattr(SessionMigration, "_check", accept)

    async def test(manager: SessionManager, session: Session, engine: FakeEngine) -> None:
        asked: list[str] = []

        async def restore_session(session_id: str, path: Path) -> Any:
            asked.append(session_id)
            await asyncio.Event().wait()

        monkeypatch.setattr(manager.engine, "restore_session", restore_session)
        migration = SessionMigration(manager, StagingDirectory(tmp_path / "staging"), None)
        key = ("me", "restored")
        restoring = asyncio.create_task(migration.restore(key, "client", tmp_path / "file", "test"))
        await until(lambda: bool(asked))
        restoring.cancel()
        await asyncio.wait([restoring])
        await manager.wait_for_closed_sessions()
        closed = [call.params.session_id for call in engine.calls if call.params.op == "close"]
        assert closed == asked and manager.find(key) is None

    scenario(test)
