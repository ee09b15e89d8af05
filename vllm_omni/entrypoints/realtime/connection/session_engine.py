# SPDX-License-Identifier: Apache-2.0
"""`SessionEngine`: runs engine requests for the realtime endpoints, with errors that are safe to
send to clients.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
from vllm.engine.protocol import EngineClient

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.engine.session_placement import SessionPlacement
from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.sessions.recorder import SessionRecorder
from vllm_omni.entrypoints.telemetry.tracing import NO_CHUNK, ChunkTrace
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import SnapshotHeader

WORLD_POSES: Final = "world_poses"
"""Key of the world poses in a chunk's metadata and replies."""


class ChunkResult(msgspec.Struct, frozen=True):
    """A chunk that the engine has generated."""

    meta: dict[str, Any]
    """Metadata from the engine's result."""
    frames_THWC: np.ndarray
    """Frames, uint8 RGB, as a view of the engine's result. The array contains no pixels if only
    latents were requested.
    """
    wall_ms: float
    """Time from the request to its result in milliseconds."""
    trace: ChunkTrace = NO_CHUNK
    """Trace that the chunk's spans belong to."""
    arrays: Mapping[str, np.ndarray] = MappingProxyType({})
    """All arrays of the engine's result by name, for example `frames` and `latents`."""

    @property
    def world_pose_fields(self) -> dict[str, Any]:
        """Return the `world_poses` reply field, which contains one pose per latent frame.

        A pose is [x_m, z_m, heading_degrees, pitch_degrees]. If the camera's world pose is unknown,
        the method returns an empty dict.
        """
        poses = self.meta.get(WORLD_POSES)
        return {} if poses is None else {WORLD_POSES: poses}


class SessionEngine:
    def __init__(
        self,
        client: EngineClient,
        placement: SessionPlacement | None = None,
        recorder: SessionRecorder | None = None,
    ) -> None:
        self._engine = OmniEngine(client, placement)
        self._recorder = recorder

    @property
    def is_dead(self) -> bool:
        return self._engine.is_dead

    async def generate(
        self, params: DiffusionParams, arrays: dict[str, np.ndarray], trace: ChunkTrace = NO_CHUNK
    ) -> ChunkResult:
        """Generate one chunk. Cancelling the call aborts the chunk at its next denoise step.

        Args:
            params: Request parameters.
            arrays: Input arrays by name.
            trace: Trace to attach to the result.

        Raises:
            EndpointError: The chunk was refused, was aborted or failed.
        """
        started_s = time.monotonic()
        # A replay compares frames, so chunks without frames are not recorded.
        recorder = None if params.output == "latents" else self._recorder
        try:
            meta, results = await self._engine.run_request(params, arrays)
        except BaseException as error:
            failure = _endpoint_error(error) if isinstance(error, RequestFailed) else None
            if recorder is not None and (
                failure is None or failure.code in ("cancelled", "engine_error")
            ):
                recorder.cancelled(params, arrays)
            if failure is None:
                raise
            raise failure from error.__cause__
        frames_THWC = results.get("frames")
        if frames_THWC is None:
            frames_THWC = np.empty((int(meta["num_frames"]), 0, 0, 3), np.uint8)
        elif recorder is not None:
            await recorder.finished(params, arrays, meta, frames_THWC)
        wall_ms = (time.monotonic() - started_s) * 1e3
        return ChunkResult(meta, frames_THWC, wall_ms, trace, results)

    async def close_session(self, session_id: str) -> None:
        """Free a session's state. An unknown id is ignored."""
        if self._recorder is not None:
            self._recorder.closed(session_id)
        with _endpoint_errors():
            await self._engine.close_session(session_id)

    async def fork_session(self, session_id: str, fork_to: str) -> None:
        """Copy a session's committed state to a new session id.

        Raises:
            EndpointError: The engine refused the copy.
        """
        with _endpoint_errors():
            await self._engine.run_request(
                DiffusionParams(session_id=session_id, op="fork", fork_to=fork_to), {}
            )
        if self._recorder is not None:
            self._recorder.forked(session_id, fork_to)

    async def save_session(
        self, session_id: str, path: Path, owner: Mapping[str, str] | None
    ) -> SnapshotHeader:
        """Write a session to a new file.

        Raises:
            EndpointError: The session could not be written.
        """
        with _endpoint_errors():
            return await self._engine.save_session(session_id, path, owner)

    async def save_session_live(
        self, session_id: str, path: Path, owner: Mapping[str, str] | None
    ) -> tuple[SnapshotHeader, float]:
        """Write a session to a new file without pausing the engine.

        Returns:
            `(header, seconds)`: the snapshot header, and the time in seconds that the engine spent
            on the snapshot.

        Raises:
            EndpointError: The session could not be written.
        """
        with _endpoint_errors():
            return await self._engine.save_session_live(session_id, path, owner)

    async def copy_session(
        self, session_id: str, path: Path, owner: Mapping[str, str] | None, *, is_playing: bool
    ) -> tuple[SnapshotHeader, int]:
        """Write or update the snapshot file of a session that is about to be moved (see
        `OmniEngine.copy_session`).

        Raises:
            EndpointError: The session could not be written.
        """
        with _endpoint_errors():
            return await self._engine.copy_session(session_id, path, owner, is_playing=is_playing)

    async def end_copy(self, path: Path) -> None:
        """Release the resources that the workers hold for a snapshot file written by
        `copy_session`.

        Raises:
            EndpointError: The engine has stopped.
        """
        with _endpoint_errors():
            await self._engine.end_copy(path)

    async def update_session(
        self, session_id: str, path: Path
    ) -> tuple[SnapshotHeader, dict[str, Any]]:
        """Update a restored session from a later version of its snapshot file.

        Returns:
            `(header, scalars)`: the snapshot's header and scalar values.

        Raises:
            EndpointError: The session could not be updated and has been closed.
        """
        with _endpoint_errors():
            return await self._engine.update_session(session_id, path)

    async def restore_session(
        self, session_id: str, path: Path
    ) -> tuple[SnapshotHeader, dict[str, Any]]:
        """Restore a session from a snapshot file.

        Returns:
            `(header, scalars)`: the snapshot's header and scalar values.

        Raises:
            EndpointError: The session could not be restored.
        """
        with _endpoint_errors():
            return await self._engine.restore_session(session_id, path)


@contextmanager
def _endpoint_errors() -> Iterator[None]:
    try:
        yield
    except RequestFailed as failure:
        raise _endpoint_error(failure) from failure.__cause__


def _endpoint_error(failure: RequestFailed) -> EndpointError:
    if failure.code == "engine_dead":
        return EndpointError("engine_error", failure.message, close=WebSocketCloseCode.INTERNAL)
    return EndpointError(failure.code, failure.message)
