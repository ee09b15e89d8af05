# SPDX-License-Identifier: Apache-2.0
"""Results that the device may still be computing: the frames of a chunk, and whether its latents
are finite.

Reading the frames or the result of the check waits for the device. On devices other than CUDA GPUs,
all work is already complete when a call returns.
"""

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from vllm_omni.model_executor.device_async import PendingScalar
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.lora.store import named
from vllm_omni.outputs import RequestFailed, pack


class PendingResult:
    """Result of a chunk that the device may still be decoding or copying to the host.

    The request must retain the inputs of the decode until the decode is done.

    Args:
        request: Chunk that the result belongs to.
        meta: Metadata of the result.
        tensors: Host tensors of the result. They are valid once `done` has completed.
        done: CUDA event recorded after the decode and the copy, or None if both are complete.
        started_s: Time when the request was first scheduled, in seconds, from `time.perf_counter`.
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
        """Whether the decode and the copy are complete, so that `wait` returns immediately."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> None:
        """Wait until the device no longer reads the request's data."""
        if self._done is not None:
            self._done.synchronize()

    def envelope(self) -> torch.Tensor:
        """Wait for the result and pack it into an envelope.

        The envelope contains only the durations of finished stages, because a clean-context pass
        may still be running.
        """
        self.wait()
        stages = self._request.timer.milliseconds_so_far()
        elapsed_ms = (time.perf_counter() - self._started_s) * 1e3
        return pack(
            {**self._meta, "timings_ms": {**stages, "total": [round(elapsed_ms, 3)]}}, self._tensors
        )


class FiniteCheck:
    """Check on the device whether a tensor is finite, without blocking the host or the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._finite = PendingScalar(torch.isfinite(tensor).all())

    @property
    def known(self) -> bool:
        """Whether the device has finished the check, so that `require` returns immediately."""
        return self._finite.known

    def require(self, what: str) -> None:
        """Wait for the result of the check.

        Args:
            what: Name of the tensor in the error message.

        Raises:
            RequestFailed: `non_finite` if the tensor contains NaN or Inf.
        """
        if not self._finite.wait():
            raise RequestFailed(
                "non_finite",
                f"{what} contains NaN or Inf; the session is unchanged, send the chunk again",
            )
