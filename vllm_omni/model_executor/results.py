# SPDX-License-Identifier: Apache-2.0
"""Results that are still on the device: a chunk's frames on their way to the host, and whether its
latents are finite.

A request keeps both (`RequestState`); reading either waits for the device. On other devices than
CUDA each call returns when its work is done. Held by tests/worker/test_overlap.py.
"""

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from vllm_omni.model_executor.device_async import Arriving
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.lora.store import named
from vllm_omni.outputs import RequestFailed, pack


class PendingResult:
    """One finished chunk's result; the device may still be decoding it or copying it to the host.

    tensors: on the host, to be read after `done`. The request must keep the decode's inputs until
    then.
    """

    def __init__(
        self,
        request: DiffusionRequest,
        meta: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        done: "torch.cuda.Event | None",
        started_s: float,
    ) -> None:
        self._request = request
        self._meta = {
            "session_id": request.session.session_id,
            "chunk_index": request.session.chunk_index,
            **meta,
        }
        if request.degradations:
            self._meta["degradations"] = list(request.degradations)
        if request.adapters:
            self._meta["lora"] = msgspec.to_builtins(named(request.adapters))
        self._tensors = tensors
        self._done = done
        self._started_s = started_s

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> None:
        """Return when the device no longer reads anything of the request."""
        if self._done is not None:
            self._done.synchronize()

    def envelope(self) -> torch.Tensor:
        """Wait, then pack the result, with the device time of the stages that have ended (a
        clean pass may run on).
        """
        self.wait()
        stages = self._request.timer.milliseconds_so_far()
        elapsed_ms = (time.perf_counter() - self._started_s) * 1e3
        return pack(
            {**self._meta, "timings_ms": {**stages, "total": [round(elapsed_ms, 3)]}}, self._tensors
        )


class FiniteCheck:
    """Whether a tensor is finite, found out on the device while the host and the device go on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._finite = Arriving(torch.isfinite(tensor).all())

    @property
    def known(self) -> bool:
        """Whether `require` would answer at once."""
        return self._finite.known

    def require(self, what: str) -> None:
        """Wait for the answer; raises `RequestFailed("non_finite", ...)` if the tensor holds NaN
        or Inf.
        """
        if not self._finite.wait():
            raise RequestFailed(
                "non_finite",
                f"{what} contains NaN or Inf; the session is unchanged, send the chunk again",
            )
