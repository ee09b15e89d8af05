# SPDX-License-Identifier: Apache-2.0
"""An engine that responds immediately, for tests of the layers above the engine."""

import asyncio
from typing import Any

import numpy as np

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

Results = tuple[dict[str, Any], dict[str, np.ndarray]]


class InstantEngine(OmniEngine):
    """An `OmniEngine` whose `run_request` responds without an engine process.

    Each generate request raises and removes the first error in `failures`, if there is one. If
    `release` is not None, generate requests wait until this event is set.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[DiffusionParams, tuple[str, ...]]] = []
        self.closed: list[str] = []
        self.cancelled = 0
        self.release: asyncio.Event | None = None
        self.failures: list[RequestFailed] = []
        self.steps = (0, 1)
        self.is_world = True

    async def run_request(self, params: DiffusionParams, arrays: Any) -> Results:
        if params.op == "close":
            self.closed.append(params.session_id)
            return {}, {}
        self.requests.append((params, tuple(arrays)))
        if self.failures:
            raise self.failures.pop(0)
        if self.release is not None:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if not self.is_world and params.num_frames is None:
            shape = (params.num_images, params.height or 32, params.width or 48, 3)
            return {}, {"images": np.full(shape, 100, np.uint8)}
        count = params.num_frames or (9 if params.chunk_index == 0 else 12)
        frames = np.full((count, params.height or 32, params.width or 48, 3), 100, np.uint8)
        return {"timings_ms": {"total": [1.0]}}, {"frames": frames}

    async def progress(self) -> dict[str, tuple[int, int]]:
        return {params.session_id: self.steps for params, _ in self.requests}
