# SPDX-License-Identifier: Apache-2.0
"""`WorldEngine`: the realtime doors' view of the engine: chunks of worlds, and errors that a socket can be told."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from vllm.engine.protocol import EngineClient

from vllm_omni.entrypoints.engine import OmniEngine
from vllm_omni.entrypoints.ranks import SessionRanks
from vllm_omni.entrypoints.realtime.errors import Close, DoorError
from vllm_omni.entrypoints.realtime.recorder import Recorder
from vllm_omni.entrypoints.tracing import NO_CHUNK, ChunkTrace
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed
from vllm_omni.sessions.snapshot import SnapshotHeader

WORLD_POSES: Final = "world_poses"
"""Where a chunk's metadata and replies have the poses."""


class ChunkResult(msgspec.Struct, frozen=True):
    """One generated chunk. frames_THWC: uint8 RGB, a view into the engine's answer; wall_ms: from submit to answer.

    trace: where its spans go on.
    """

    meta: dict[str, Any]
    frames_THWC: np.ndarray
    wall_ms: float
    trace: ChunkTrace = NO_CHUNK

    @property
    def world_pose_fields(self) -> dict[str, Any]:
        """The field `world_poses` of replies: [x_m, z_m, heading_degrees, pitch_degrees] for each latent frame.

        No field where the camera's pose in the world is unknown.
        """
        poses = self.meta.get(WORLD_POSES)
        return {} if poses is None else {WORLD_POSES: poses}


class WorldEngine:
    def __init__(
        self, client: EngineClient, ranks: SessionRanks | None = None, recorder: Recorder | None = None
    ) -> None:
        self._engine = OmniEngine(client, ranks)
        self._recorder = recorder

    @property
    def is_dead(self) -> bool:
        return self._engine.is_dead

    async def generate(
        self, params: DiffusionParams, arrays: dict[str, np.ndarray], trace: ChunkTrace = NO_CHUNK
    ) -> ChunkResult:
        """Run one chunk. Raises `DoorError`. When cancelled, the engine drops the chunk at its next step.

        trace: goes into the result.
        """
        started_s = time.monotonic()
        try:
            meta, results = await self._engine.run(params, arrays)
        except BaseException as error:
            failure = _door_error(error) if isinstance(error, RequestFailed) else None
            if self._recorder is not None and (failure is None or failure.code in ("cancelled", "engine_error")):
                self._recorder.cancelled(params, arrays)
            if failure is None:
                raise
            raise failure from error.__cause__
        if self._recorder is not None:
            await self._recorder.finished(params, arrays, meta, results["frames"])
        return ChunkResult(meta, results["frames"], (time.monotonic() - started_s) * 1e3, trace)

    async def close(self, session_id: str) -> None:
        """Free a session's state; unknown ids are fine."""
        if self._recorder is not None:
            self._recorder.closed(session_id)
        with _door_errors():
            await self._engine.close(session_id)

    async def fork(self, session_id: str, fork_to: str) -> None:
        """Copy a session's committed state to the new id `fork_to`. Raises `DoorError`."""
        with _door_errors():
            await self._engine.run(DiffusionParams(session_id=session_id, op="fork", fork_to=fork_to), {})
        if self._recorder is not None:
            self._recorder.forked(session_id, fork_to)

    async def save(self, session_id: str, path: Path, owner: Mapping[str, str] | None) -> SnapshotHeader:
        """Write a session to the new file `path`. Raises `DoorError`."""
        with _door_errors():
            return await self._engine.save_session(session_id, path, owner)

    async def checkpoint(
        self, session_id: str, path: Path, owner: Mapping[str, str] | None
    ) -> tuple[SnapshotHeader, float]:
        """The same while the engine goes on: `(header, seconds that it cost the engine)`. Raises `DoorError`."""
        with _door_errors():
            return await self._engine.checkpoint_session(session_id, path, owner)

    async def restore(self, session_id: str, path: Path) -> tuple[SnapshotHeader, dict[str, Any]]:
        """Make a session of a file: `(header, scalars)`. Raises `DoorError`."""
        with _door_errors():
            return await self._engine.restore_session(session_id, path)


@contextmanager
def _door_errors() -> Iterator[None]:
    try:
        yield
    except RequestFailed as failure:
        raise _door_error(failure) from failure.__cause__


def _door_error(failure: RequestFailed) -> DoorError:
    if failure.code == "engine_dead":
        return DoorError("engine_error", failure.message, close=Close.INTERNAL)
    return DoorError(failure.code, failure.message)
