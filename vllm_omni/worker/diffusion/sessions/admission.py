# SPDX-License-Identifier: Apache-2.0
"""`Admission`: acquires a request's session and conditioning on one rank, and releases them when
the request ends.

Before its first step, a generation request gets its session (which is created for the first chunk)
and its encoded conditioning. The session is pinned until `release` is called. Session operations
run immediately. An exception becomes the `failure` of the request; if the request has created its
session, the session is closed. This module does not depend on a model.
"""

from collections.abc import Sequence

import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import StageTimer
from vllm_omni.model_executor.interfaces import (
    DiffusionRequest,
    SupportsSessionWindows,
    SupportsStepExecution,
    SupportsTrajectory,
)
from vllm_omni.model_executor.layers.lora.store import NoAdapters, Selection, named
from vllm_omni.model_executor.requests import RequestState, as_failure
from vllm_omni.outputs import RequestFailed, pack
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.sessions.in_flight import ChunksInFlight
from vllm_omni.worker.diffusion.sessions.store import SessionStore

_UNKNOWN = 2**31 - 1
"""Number of frames assumed for a session that does not exist yet. The number is larger than any
window."""


class Admission:
    """Admits and releases requests on one rank.

    Args:
        model: Model that encodes conditions and creates sessions.
        sessions: Sessions of the rank.
        in_flight: Chunks in flight on the rank.
        device: Device used to time the model's stages.
        adapters: Store of the LoRA adapters registered on this rank.
    """

    def __init__(
        self,
        model: SupportsStepExecution,
        sessions: SessionStore,
        in_flight: ChunksInFlight,
        device: torch.device,
        adapters: NoAdapters,
    ) -> None:
        self._adapters = adapters
        self._model = model
        self._sessions = sessions
        self._in_flight = in_flight
        self._device = device

    def _check_window(self, params: DiffusionParams) -> None:
        chosen = params.window_frames is not None or params.sink_frames is not None
        if chosen and not isinstance(self._model, SupportsSessionWindows):
            raise RequestFailed(
                "invalid_request",
                "window_frames and sink_frames are fixed by this server: leave them out",
            )

    def _record_trajectory(self, request: DiffusionRequest) -> None:
        if not isinstance(self._model, SupportsTrajectory):
            raise RequestFailed(
                "invalid_request", "trajectory requires a streaming model; leave it out"
            )
        self._model.record_trajectory(request)

    def grow_sessions(self, states: Sequence[RequestState], agreement: RankAgreement) -> None:
        """Grow the sessions of chunks that are about to be admitted, or limit their windows.

        All ranks that share layers make the same decision (collective with `omni.kv_growth`).

        Args:
            states: Requests to be admitted. They are the same on all ranks that share layers.
            agreement: Agreement with the ranks that share layers.
        """
        names = [state.params.session_id for state in states if state.params is not None]
        held = [
            self._sessions.grow_session(name) if name in self._sessions else _UNKNOWN
            for name in names
        ]
        for name, frames in zip(names, agreement.least(held), strict=True):
            if name in self._sessions:
                self._sessions.get(name).limit_window(frames)

    def admit(
        self, state: RequestState, outputs: dict[str, torch.Tensor], index: int | None = None
    ) -> None:
        """Acquire the session and the conditioning of a request, or run its session operation.

        This method raises no exceptions. After the call, the request has a `chunk`, a result or a
        `failure`.

        Args:
            state: Request to admit.
            outputs: Dict that receives the result of a session operation, keyed by request id.
            index: Chunk index that an earlier pipeline stage assigned; None on the first stage.
        """
        params = state.params
        assert params is not None
        try:
            if state.is_session_operation:
                outputs[state.request_id] = pack(self._sessions.operate(params))
                return
            if params.one_shot and params.session_id in self._sessions:
                raise RequestFailed(
                    "invalid_request",
                    f"one_shot needs a new session_id, {params.session_id!r} is live",
                )
            if params.session_id not in self._sessions:
                if index is None and params.chunk_index:
                    self._sessions.get(params.session_id)  # raises `unknown_session`
                self._check_window(params)
                nbytes = self._model.session_nbytes(params)
                self._sessions.make_room(nbytes)
                self._sessions.add_session(self._model.new_session(params))
                state.opened_session = True
            self._sessions.resume(params.session_id)
            session = self._sessions.get(params.session_id)
            if session.failure is not None:
                raise session.failure
            num_ahead, predecessor = self._in_flight.ahead(params.session_id)
            expected = session.chunk_index + num_ahead
            # If the indices differ, the predecessor may have failed on this rank, and the stage
            # that assigned the index has not received the failure yet.
            if index is not None and index != expected:
                predecessor = self._in_flight.failed(params.session_id, index - 1)
                expected = expected if predecessor is None else index
            wanted = params.chunk_index if index is None else index
            if wanted is not None and wanted != expected:
                raise RequestFailed(
                    "out_of_order",
                    f"chunk_index {wanted} arrived, session {params.session_id!r} expects "
                    f"{expected}",
                )
            before = session.adapters if predecessor is None else predecessor.adapters
            adapters = self._select(state, before)
            request = DiffusionRequest(
                state.request_id,
                params,
                state.tensors,
                session,
                degradations=(*state.degradations, *session.degradations),
                predecessor=predecessor,
                adapters=adapters,
                same_adapters=adapters == before,
                timer=StageTimer(self._device),
            )
            with request.timer.stage("encode"), self._adapters.applied(adapters):
                self._model.prepare_encode(request)
            assert request.num_steps > 0, "prepare_encode must set num_steps"
            if params.trajectory:
                self._record_trajectory(request)
            request.predecessor = None
            self._sessions.pin(params.session_id)
            state.chunk, state.index = request, expected
            self._in_flight.add_chunk(state, predecessor)
        except Exception as error:
            state.failure = as_failure(error, state.request_id)
            self._drop_unborn_session(state)

    def _select(self, state: RequestState, before: Selection) -> Selection:
        """Select the adapters that the chunk specifies. If the chunk specifies none, select the
        adapters of its predecessor.
        """
        assert state.params is not None
        if state.params.lora is not None:
            return self._adapters.select(state.params.lora)
        if state.lora_request is not None:
            return self._adapters.select_request(state.lora_request)
        return self._adapters.select(named(before)) if before else ()

    def release(self, state: RequestState | None) -> None:
        """Release all resources of a request that the scheduler has finished or aborted."""
        if state is None:
            return
        if state.pending is not None:
            state.pending.wait()
        if state.chunk is not None:
            self._in_flight.release(state.chunk)
            self._sessions.unpin(state.chunk.session.session_id)
            state.chunk.state = None
        self._drop_unborn_session(state)

    def _drop_unborn_session(self, state: RequestState) -> None:
        """Close the session that a request has created, if its first chunk was not committed or if
        the request is one-shot.
        """
        if state.opened_session and state.params is not None:
            session_id = state.params.session_id
            if session_id in self._sessions:
                session = self._sessions.get(session_id)
                # Other ranks still hold a session that has failed on this rank, so keep it here,
                # too, and report the failure.
                lost = session.failure is not None
                if state.params.one_shot or (session.chunk_index == 0 and not lost):
                    self._sessions.close(session_id)
            state.opened_session = False
