# SPDX-License-Identifier: Apache-2.0
"""`WorldEngine`: the realtime doors' view of the engine: chunks of worlds, and errors that a socket can be told."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient

from vllm_omni.entrypoints.engine import OmniEngine
from vllm_omni.entrypoints.ranks import SessionRanks
from vllm_omni.entrypoints.realtime.errors import Close, DoorError
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed


@dataclass(frozen=True)
class ChunkResult:
    """One generated chunk. frames_THWC: uint8 RGB, a view into the engine's answer; wall_ms: from submit to answer."""

    meta: dict[str, Any]
    frames_THWC: np.ndarray
    wall_ms: float


class WorldEngine:
    def __init__(self, client: EngineClient, ranks: SessionRanks | None = None) -> None:
        self._engine = OmniEngine(client, ranks)

    async def generate(self, params: DiffusionParams, arrays: dict[str, np.ndarray]) -> ChunkResult:
        """Run one chunk. Raises `DoorError`. When cancelled, the engine drops the chunk at its next step."""
        started_s = time.monotonic()
        meta, results = await self._request(params, arrays)
        return ChunkResult(meta, results["frames"], (time.monotonic() - started_s) * 1e3)

    async def close(self, session_id: str) -> None:
        """Free a session's state; unknown ids are fine."""
        await self._request(DiffusionParams(session_id=session_id, op="close"), {})

    async def fork(self, session_id: str, fork_to: str) -> None:
        """Copy a session's committed state to the new id `fork_to`. Raises `DoorError`."""
        await self._request(DiffusionParams(session_id=session_id, op="fork", fork_to=fork_to), {})

    async def _request(
        self, params: DiffusionParams, arrays: dict[str, np.ndarray]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            return await self._engine.run(params, arrays)
        except RequestFailed as failure:
            if failure.code == "engine_dead":
                raise DoorError("engine_error", failure.message, close=Close.INTERNAL) from None
            raise DoorError(failure.code, failure.message) from failure.__cause__
