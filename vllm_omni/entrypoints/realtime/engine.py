# SPDX-License-Identifier: Apache-2.0
"""`WorldEngine`: the doors' only way to vLLM's engine. One call = one chunk = one pooling request.

Everything here is stock `EngineClient` surface: `encode` and `abort`. Torch stops at this file: doors see NumPy.
"""

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError
from vllm.outputs import PoolingRequestOutput
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_omni.entrypoints.realtime.errors import Close, DoorError
from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.outputs import RequestFailed, unpack


@dataclass(frozen=True)
class ChunkResult:
    """One generated chunk. frames_THWC: uint8 RGB, a view into the engine's answer; wall_ms: from submit to answer."""

    meta: dict[str, Any]
    frames_THWC: np.ndarray
    wall_ms: float


class WorldEngine:
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def generate(self, params: DiffusionParams, arrays: dict[str, np.ndarray]) -> ChunkResult:
        """Run one chunk. Raises `DoorError`. When cancelled, the engine drops the chunk at its next step."""
        started_s = time.monotonic()
        meta, tensors = await self._request(params, arrays)
        return ChunkResult(meta, tensors["frames"].numpy(), (time.monotonic() - started_s) * 1e3)

    async def close(self, session_id: str) -> None:
        """Free a session's state; unknown ids are fine."""
        await self._request(DiffusionParams(session_id=session_id, op="close"), {})

    async def fork(self, session_id: str, fork_to: str) -> None:
        """Copy a session's committed state to the new id `fork_to`. Raises `DoorError`."""
        await self._request(DiffusionParams(session_id=session_id, op="fork", fork_to=fork_to), {})

    async def _request(
        self, params: DiffusionParams, arrays: dict[str, np.ndarray]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        request_id = f"omni-{uuid.uuid4().hex}"
        answer: PoolingRequestOutput | None = None
        try:
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            async for output in self._client.encode(engine_prompt(), params.to_pooling_params(tensors), request_id):
                answer = output
            if answer is None or answer.outputs.data.numel() == 0:  # stock vLLM's answer to an aborted request
                raise DoorError("cancelled", "the request was cancelled")
            return unpack(answer.outputs.data)
        except asyncio.CancelledError:
            await self._client.abort(request_id)  # a dropped `encode` generator does not; unknown ids are ignored
            raise
        except RequestFailed as failure:
            # The engine knows sessions by ids made here; a client knows its own.
            raise DoorError(failure.code, failure.message.replace(repr(params.session_id), "this session")) from None
        except EngineDeadError:
            raise DoorError("engine_error", "the engine has stopped", close=Close.INTERNAL) from None
        except VLLMClientError as error:
            raise DoorError("invalid_request", "the engine refused the request") from error
        except EngineGenerateError as error:
            raise DoorError(
                "engine_error", "the engine failed on this request; the server's log has details"
            ) from error
