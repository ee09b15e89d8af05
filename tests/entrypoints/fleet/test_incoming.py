# SPDX-License-Identifier: Apache-2.0
"""Sessions that arrive from another server, and the versions of such sessions that become live. The
engine is a fake.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_engine import FakeEngine

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.fleet.incoming import IncomingSessions
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.staging_directory import StagingDirectory
from vllm_omni.session_files.snapshot import (
    ModelIdentity,
    ParallelLayout,
    RankDescription,
    RankPart,
    SnapshotHeader,
    read_header,
)
from vllm_omni.session_files.snapshot_writing import create_file, plan

KEY = ("abc", "walk")
MOVE = "move-1"


def write_snapshot(path: Path, chunk_index: int, *, is_complete: bool) -> None:
    """Write a session file without tensors, or replace it with a later version."""
    scalars = {"prompt": "a village", "seed": 3}
    described = RankDescription(
        model=ModelIdentity(family="null_world", config="0", parallel=ParallelLayout(1, 1)),
        chunk_index=chunk_index,
        opening={"height": 32, "width": 48},
        part=RankPart(weights="0", scalars=scalars),
        tensors={},
    )
    owner = {"principal": KEY[0], "session_id": KEY[1], "client": KEY[0]}
    planned = plan([described], "0.1.0", owner, is_complete=is_complete)
    path.unlink(missing_ok=True)
    create_file(path, planned)


async def read(self: OmniEngine, session_id: str, path: Path) -> tuple[SnapshotHeader, Any]:
    """Simulate the workers, which would read the tensors."""
    header = read_header(path)
    return header, header.ranks[0].scalars


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a test and passes it the incoming sessions and the manager of
    live sessions.
    """
    for name in ("restore_session", "update_session"):
        monkeypatch.setattr(OmniEngine, name, read)

    def run(test: Callable[[IncomingSessions, SessionManager], Awaitable[None]]) -> None:
        async def served() -> None:
            engine: Any = SessionEngine(FakeEngine())  # type: ignore[arg-type]
            info = StreamInfo(height=32, width=48)
            manager = SessionManager(engine, info, EndpointLimits(), ThreadPoolExecutor(1))
            migration = SessionMigration(manager, StagingDirectory(tmp_path / "staging"), None)
            await test(IncomingSessions(migration), manager)
            await manager.shutdown()

        asyncio.run(served())

    return run


def test_only_a_complete_version_becomes_live(run: Callable[..., None], tmp_path: Path) -> None:
    """A session version written while the session was playing does not become live, because it may
    mix the state of two chunks.
    """
    path = tmp_path / "shared.safetensors"

    async def test(incoming: IncomingSessions, manager: SessionManager) -> None:
        write_snapshot(path, 4, is_complete=False)
        await incoming.prepare_shared(MOVE, path)
        with pytest.raises(EndpointError) as refused:
            incoming.commit(MOVE)
        assert refused.value.code == "invalid_snapshot"
        assert manager.find(KEY) is None

        write_snapshot(path, 5, is_complete=True)
        await incoming.prepare_shared(MOVE, path)
        live = incoming.commit(MOVE)
        assert manager.find(KEY) is live
        assert live.next_chunk == 5

    run(test)


def test_a_move_is_refused_if_the_last_version_is_incomplete(
    run: Callable[..., None], tmp_path: Path
) -> None:
    """If the last version of a session is incomplete, the move is refused, even if an earlier
    version was complete. Ending the move frees the session.
    """
    path = tmp_path / "shared.safetensors"

    async def test(incoming: IncomingSessions, manager: SessionManager) -> None:
        for chunk_index, is_complete in ((4, True), (5, False)):
            write_snapshot(path, chunk_index, is_complete=is_complete)
            await incoming.prepare_shared(MOVE, path)
        with pytest.raises(EndpointError, match="last version"):
            incoming.commit(MOVE)
        assert incoming.end(MOVE) == "aborted"
        assert len(manager) == 0

    run(test)
