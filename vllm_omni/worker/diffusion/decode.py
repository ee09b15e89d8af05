# SPDX-License-Identifier: Apache-2.0
"""Finishes chunks on one rank: checks, decodes, commits and delivers them.

On the rank with the last layers, `ChunkEnd` checks a chunk, decodes it, commits it to its session
and delivers its result. All other ranks commit or fail the chunk when a message from that rank
arrives. `ResultStream` decodes on a separate CUDA stream. This module does not depend on a model or
on denoise steps.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from vllm_omni.model_executor.interfaces import (
    DiffusionRequest,
    Result,
    SupportsBatchedDecode,
    SupportsStepExecution,
)
from vllm_omni.model_executor.layers.lora.store import NoAdapters
from vllm_omni.model_executor.requests import RequestState, as_failure, group_states
from vllm_omni.model_executor.results import PendingResult
from vllm_omni.outputs import empty_result, pack, pack_error
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.sessions.in_flight import ChunksInFlight

logger = logging.getLogger("vllm." + __name__)

_MAX_STEP_BYTES = 20 << 20
"""Maximum total size in bytes of the results delivered in one engine step. vLLM's ring buffer from
the worker to the engine accepts messages of up to 24 MiB; larger messages take a path that is about
ten times slower."""


class ResultStream:
    """CUDA stream that decodes results and copies them to the host.

    Args:
        device: Device of the decode.
        overlap: Whether to use a separate CUDA stream.
        overlaps_steps: Whether denoise steps run on the same device (false on a VAE stage). If
            true, the decode has a higher priority than the steps, because a client is waiting for
            the frames.
    """

    def __init__(self, device: torch.device, overlap: bool, *, overlaps_steps: bool = True) -> None:
        self._cuda = device.type == "cuda"
        priority = -1 if overlaps_steps else 0
        self._stream = (
            torch.cuda.Stream(device, priority=priority) if self._cuda and overlap else None
        )

    def launch(
        self,
        requests: Sequence[DiffusionRequest],
        started_s: Sequence[float],
        decode: Callable[[], Sequence[Result]],
    ) -> list[PendingResult]:
        """Launch a decode and the copy of its tensors to the host.

        This method must be called before the next chunk of a session changes the session.

        Args:
            requests: Chunks to decode.
            started_s: Start time of each chunk in seconds.
            decode: Function that decodes the chunks.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with (
            torch.cuda.stream(self._stream)
            if self._stream is not None
            else contextlib.nullcontext()
        ):
            with contextlib.ExitStack() as timed:
                for request in requests:
                    timed.enter_context(request.timer.stage("decode"))
                results = decode()
            metas = [meta for meta, _ in results]
            hosts = [
                {name: _to_host(tensor) for name, tensor in tensors.items()}
                for _, tensors in results
            ]
            done = torch.cuda.Event() if self._cuda else None
            if done is not None:
                done.record()
        of_each = zip(requests, metas, hosts, started_s, strict=True)
        return [
            PendingResult(request, meta, host, done, since_s)
            for request, meta, host, since_s in of_each
        ]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying a CUDA tensor to page-locked memory. A host tensor is returned unchanged."""
    if not tensor.is_cuda:
        return tensor
    return empty_result(tensor.shape, tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


class ChunkEnd:
    """Finishes the chunks on one rank.

    Args:
        model: The model.
        adapters: Store of the LoRA adapters registered on this rank.
        agreement: Agreement with the other ranks.
        in_flight: Chunks in flight on the rank.
        results: CUDA stream that decodes frames.
        decodes: Whether this rank decodes in addition to running layers.
        shares_decode: Whether the ranks that share layers decode together. If so, each rank decodes
            one band of the frame.
        overlap: Whether the result of a chunk is returned in a later engine step than the one that
            runs the chunk's last step.
    """

    def __init__(
        self,
        model: SupportsStepExecution,
        adapters: NoAdapters,
        agreement: RankAgreement,
        in_flight: ChunksInFlight,
        results: ResultStream,
        *,
        decodes: bool,
        shares_decode: bool,
        overlap: bool,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._agreement = agreement
        self._in_flight = in_flight
        self._results = results
        self._decodes = decodes
        self.shares_decode = shares_decode
        self._overlap = overlap
        self.denoised: list[str] = []
        """Requests of the current engine step whose chunk has been committed but whose result has
        not been delivered.
        """
        self.committed: list[str] = []
        """Requests of the current engine step whose chunk was committed to its session."""

    def start_step(self) -> None:
        self.denoised, self.committed = [], []

    def decode_before_clean_pass(self, states: Sequence[RequestState]) -> None:
        """Launch the decode of chunks whose latents are final, before their clean-context pass.

        Call this method immediately after launching the step that makes the latents final. If
        decodes run on the CUDA stream of the steps, the device then decodes while the host launches
        the clean-context pass, and runs the clean-context pass while the host delivers the result.
        """
        if not self._decodes:
            return
        early = []
        for state in states:
            request = state.chunk
            assert request is not None
            is_final = (
                request.clean_passes and request.step == request.num_steps - request.clean_passes
            )
            if is_final and self._in_flight.is_next(request):
                early.append(state)
        self.decode_together(early)
        for state in early:
            if state.pending is None:
                self.decode(state)

    def decode_together(self, states: Sequence[RequestState]) -> None:
        """Launch the decodes that chunks of one forward pass can share.

        `finish` decodes all other chunks separately. If a shared decode raises an exception,
        `finish` also decodes its chunks separately, so that only the request that caused the
        exception fails.
        """
        model = self._model
        if not self._decodes or len(states) < 2 or not isinstance(model, SupportsBatchedDecode):
            return
        sharing, most = [], len(states)
        for state in states:
            if state.chunk is not None and state.failure is None and state.pending is None:
                limit = model.most_decoded_together(state.chunk)
                if limit > 1:
                    sharing.append(state)
                    most = min(most, limit)
        for members in group_states(self._model, sharing, most):
            if len(members) == 1:
                continue
            requests = [state.chunk for state in members if state.chunk is not None]
            try:
                pending = self._results.launch(
                    requests,
                    [state.started_s for state in members],
                    partial(model.post_decode_together, requests),
                )
            except Exception:
                logger.warning(
                    "a shared decode of %d chunks failed; decoding them separately",
                    len(members),
                    exc_info=True,
                )
                continue
            for state, result in zip(members, pending, strict=True):
                state.pending = result

    def finish(self, state: RequestState, outputs: dict[str, torch.Tensor]) -> None:
        """Check, decode and commit a chunk. On the last stage, only this method commits chunks.

        Args:
            state: Request of the chunk.
            outputs: Dict that receives the result, keyed by request id.
        """
        request = state.chunk
        assert request is not None
        try:
            assert state.finite is not None
            state.finite.require("the chunk's latents")
        except Exception as error:
            state.failure = as_failure(error, state.request_id)
        if self._decodes and state.pending is None and state.decode_failure is None:
            self.decode(state)
        # If the latents are not finite, the check's error is clearer than the decoder's error.
        if state.failure is None:
            state.failure = state.decode_failure
        try:
            if state.failure is None and state.pending is not None and not self._overlap:
                outputs[state.request_id] = state.pending.envelope()
        except Exception as error:
            state.failure = as_failure(error, state.request_id)
        if self._agreement.several:
            self._agreement.agree(state)
        if state.failure is not None:
            outputs.pop(state.request_id, None)
            return
        self.commit(request)
        self.release_result(state, outputs)

    def commit(self, request: DiffusionRequest) -> None:
        """Commit a chunk to its session, and remove it from the chunks in flight."""
        with self._adapters.applied(request.adapters):
            self._model.commit(request)
        request.session.adapters = request.adapters
        self._in_flight.end(request)
        self.committed.append(request.request_id)

    def release_result(self, state: RequestState, outputs: dict[str, torch.Tensor]) -> None:
        """Deliver the result of a committed chunk. With `overlap`, the result is delivered once it
        is ready, possibly in a later engine step; otherwise, it is delivered immediately.
        """
        if state.pending is None:
            outputs[state.request_id] = pack({})
        elif self._overlap:
            self.denoised.append(state.request_id)
        elif state.request_id not in outputs:
            outputs[state.request_id] = state.pending.envelope()

    def ready(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Return the requests whose chunk ended in this engine step and whose result is ready."""
        return [
            state
            for state in states
            if state.request_id in self.denoised
            and state.pending is not None
            and state.pending.ready()
        ]

    def deliver(
        self, states: Sequence[RequestState], outputs: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return as many results of a step as fit into the worker's ring buffer.

        The remaining results are held back until the next step.
        """
        deliver: dict[str, torch.Tensor] = {}
        room = _MAX_STEP_BYTES
        for state in states:
            envelope = outputs.get(state.request_id) if state.deferred is None else state.deferred
            if envelope is None:
                continue
            if state.failure is None:
                # A failed request retains its pending result, because `release` waits for a running
                # decode.
                state.pending = None
            if deliver and envelope.numel() > room:
                state.deferred = envelope
            else:
                deliver[state.request_id] = envelope
                room -= envelope.numel()
        self.denoised = [request_id for request_id in self.denoised if request_id not in deliver]
        return deliver

    def pack_failures(
        self, states: Sequence[RequestState], outputs: dict[str, torch.Tensor]
    ) -> None:
        """Pack the errors of failed requests. Later chunks of the same session that are in flight
        also fail.
        """
        for state in states:
            if state.failure is not None and state.chunk is not None:
                self._in_flight.fail(state.chunk)
        for state in states:
            if state.failure is not None and state.request_id not in outputs:
                outputs[state.request_id] = pack_error(state.failure.code, state.failure.message)

    def decode(self, state: RequestState) -> None:
        """Launch the decode of a chunk that has not failed. If the decode raises an error, the
        error is stored in `decode_failure`.

        Ranks with layers fail the chunk only at its last step, because other ranks depend on the
        forward passes of the chunk until then.
        """
        if self.shares_decode:
            self._agreement.agree(state)
        request = state.chunk
        if state.failure is not None or request is None:
            return
        try:
            (state.pending,) = self._results.launch(
                [request], [state.started_s], lambda: [self._model.post_decode(request)]
            )
        except Exception as error:
            if self.shares_decode:
                raise  # other ranks wait in the collectives of this decode, so the engine must exit
            state.decode_failure = as_failure(error, state.request_id)
