# SPDX-License-Identifier: Apache-2.0
"""`Admission`: acquires a request's session and conditions on one rank before its first step, releases them at its end.

A generating request gets its session, opened if it is the first chunk, and its encoded conditions; the session is
pinned until `release`. Session operations run here at once. An exception becomes the request's `failure`, and a session
that the request opened is closed. Knows no model by name.
Held by tests/worker/test_diffusion_model_runner.py and test_in_flight.py there.
"""

import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import StageTimer
from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsSessionWindows, SupportsStepExecution
from vllm_omni.model_executor.lora.store import NoAdapters, Selection, named
from vllm_omni.model_executor.requests import RequestState, as_failure
from vllm_omni.outputs import RequestFailed, pack
from vllm_omni.worker.diffusion.in_flight import ChunksInFlight
from vllm_omni.worker.diffusion.sessions import SessionStore


class Admission:
    """device: where the model's stages are timed."""

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
                "invalid_request", "window_frames and sink_frames are fixed by this server: leave them out"
            )

    def admit(self, state: RequestState, outputs: dict[str, torch.Tensor], index: int | None = None) -> None:
        """Give the request its session and its conditions; run a session operation at once, answered in `outputs`.

        index: the chunk index that an earlier pipeline stage gave the request; None = this rank is the first stage.
        Afterwards the request has its `chunk`, its answer or its `failure`; nothing is raised.
        """
        params = state.params
        assert params is not None
        try:
            if state.is_session_operation:
                outputs[state.request_id] = pack(self._sessions.operate(params))
                return
            if params.one_shot and params.session_id in self._sessions:
                raise RequestFailed(
                    "invalid_request", f"one_shot needs a new session_id, {params.session_id!r} is live"
                )
            if params.session_id not in self._sessions:
                self._check_window(params)
                nbytes = self._model.session_nbytes(params)
                self._sessions.make_room(nbytes)
                self._sessions.add(self._model.new_session(params))
                state.opened_session = True
            session = self._sessions.get(params.session_id)
            if session.failure is not None:
                raise session.failure
            expected = session.chunk_index + self._in_flight.count(params.session_id)
            predecessor = self._in_flight.last(params.session_id)
            if index is not None and index != expected:  # the chunk before has failed, which is not known there yet
                predecessor = self._in_flight.failed(params.session_id, index - 1)
                expected = expected if predecessor is None else index
            wanted = params.chunk_index if index is None else index
            if wanted is not None and wanted != expected:
                raise RequestFailed(
                    "out_of_order",
                    f"chunk_index {wanted} arrived, session {params.session_id!r} expects {expected}",
                )
            before = session.adapters if predecessor is None else predecessor.adapters
            adapters = self._select(state, before)
            request = DiffusionRequest(
                state.request_id,
                params,
                state.tensors,
                session,
                degradations=state.degradations,
                predecessor=predecessor,
                adapters=adapters,
                same_adapters=adapters == before,
                timer=StageTimer(self._device),
            )
            with request.timer.stage("encode"), self._adapters.applied(adapters):
                self._model.prepare_encode(request)
            assert request.num_steps > 0, "prepare_encode must set num_steps"
            request.predecessor = None
            self._sessions.pin(params.session_id)
            state.chunk, state.index = request, expected
            self._in_flight.add(state, predecessor)
        except Exception as error:
            state.failure = as_failure(error, state.request_id)
            self._drop_unborn_session(state)

    def _select(self, state: RequestState, before: Selection) -> Selection:
        """The chunk's adapters: those it names, else those of the chunk before it, as they are loaded now."""
        params, request = state.params, state.lora_request
        assert params is not None
        if params.lora is not None:
            return self._adapters.select(params.lora)
        return self._adapters.select(named(before)) if request is None else self._adapters.select_request(request)

    def release(self, state: RequestState | None) -> None:
        """The scheduler has finished or aborted this request: let go of everything it held."""
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
        """A session whose first chunk never succeeded does not exist, and a one-shot request's session ends with it."""
        if state.opened_session and state.params is not None:
            session_id = state.params.session_id
            if session_id in self._sessions:
                session = self._sessions.get(session_id)
                lost = session.failure is not None  # it lives on other ranks, and says so here
                if state.params.one_shot or (session.chunk_index == 0 and not lost):
                    self._sessions.close(session_id)
            state.opened_session = False
