# SPDX-License-Identifier: Apache-2.0
"""`DiffusionGPUModelRunner`: runs denoise steps for the requests the scheduler picked; owns device memory.

It has no vLLM base class (what a worker asks of any runner and this one has no use for is in `surface.py`) and
only sequences its parts: `RequestStates`, `Admission`, `SessionStore`, `group_requests`, `RankAgreement`,
`ReturnChannel`, `ChunkEnd` and the model. It knows no model by name and no sockets.

Invariants (tests/worker/test_diffusion_model_runner.py, test_decode_before_clean_pass.py there, tests/engine/):
- a session is opened by its first chunk and freed by the store, nowhere else;
- a request that fails or is aborted leaves its session as it was; the others in its batch go on;
- with several ranks, every decision before a collective is the same on all of them.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group
from vllm.model_executor.model_loader import get_model_loader
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_omni.config import OmniConfig
from vllm_omni.core.step_output import ChunkProgress, StepOutput
from vllm_omni.model_executor.interfaces import (
    DiffusionRequest,
    SupportsStepExecution,
    SupportsVAEStage,
    check_chunks_in_flight,
    check_degradations,
    check_parallel_decode,
)
from vllm_omni.registration import steps_one_at_a_time
from vllm_omni.worker.diffusion.admission import Admission
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.batches import group_requests
from vllm_omni.worker.diffusion.decode import ChunkEnd, ResultStream, deliverable
from vllm_omni.worker.diffusion.in_flight import ChunksInFlight
from vllm_omni.worker.diffusion.link import ReturnChannel, StageNote, connect_forward, together, unpack
from vllm_omni.worker.diffusion.pacing import StepPacer
from vllm_omni.worker.diffusion.requests import RequestState, RequestStates, as_failure
from vllm_omni.worker.diffusion.results import FiniteCheck
from vllm_omni.worker.diffusion.sessions import SessionStore
from vllm_omni.worker.diffusion.surface import RunnerSurface
from vllm_omni.worker.diffusion.temporal import TemporalStage
from vllm_omni.worker.diffusion.vae_stage import VAEStage, hand_over
from vllm_omni.worker.diffusion.whole_request import WholeRequestModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

_HIDDEN = "hidden"


class DiffusionGPUModelRunner(RunnerSurface):
    """One rank's runner. All methods are called by the worker from one thread."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.load_config = vllm_config.load_config
        self.device = device
        self.omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        self.pp, self.tp = get_pp_group(), get_tp_group()
        # With the stock scheduler one engine step is a whole chunk.
        self.step_at_a_time = steps_one_at_a_time(vllm_config)
        self.agreement = RankAgreement(self.tp, get_world_group())
        self.requests = RequestStates()
        self.sessions = SessionStore(self.omni.max_sessions, self.omni.session_idle_s, clock=self.agreement.clock)
        self.kv_caches: list[torch.Tensor] = []
        self.model_memory_usage = 0
        self._num_stages = self.pp.world_size - self.omni.vae_stage
        self._ends_steps = self.pp.rank_in_group == self._num_stages - 1
        """Whether this rank has the last layers: it runs the schedule, checks and commits first."""
        self._vae_stage: VAEStage | None = None
        self._channel: ReturnChannel | None = None
        several_gpus = device.type == "cuda" and get_world_group().world_size > 1
        overlap = several_gpus if self.omni.overlap_decode is None else self.omni.overlap_decode
        self._overlap_decode = overlap and self.step_at_a_time
        self._results = ResultStream(device, self._overlap_decode, beside_steps=not self.omni.vae_stage)
        self._pacer = StepPacer(device, stages=self.pp.world_size > 1)
        self._hands_over = self.omni.vae_stage and self._ends_steps
        """Whether the VAE stage follows. What it is told must not wait for the step: results leave with it."""
        self._in_flight = ChunksInFlight(self.omni.chunks_in_flight)
        self._temporal: TemporalStage | None = None
        if self.omni.pipeline == "temporal":
            self._temporal = TemporalStage(self.pp.rank_in_group, self._num_stages)

    # -- what the worker asks at start --------------------------------------------------------------------------

    def load_model(self, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            self.load_config.load_format = "dummy"
        loader = get_model_loader(self.load_config)
        model = loader.load_model(vllm_config=self.vllm_config, model_config=self.model_config)
        self.model_memory_usage = sum(p.numel() * p.element_size() for p in model.parameters())
        in_steps = isinstance(model, SupportsStepExecution) and model.supports_step_execution
        self.model: Any = model if in_steps else WholeRequestModel(model)
        check_degradations(model, self.omni.degradations)
        self._in_flight.steps_behind = check_chunks_in_flight(model, self.omni, self._num_stages)
        self.admission = Admission(self.model, self.sessions, self._in_flight, self.device)
        shares_decode = check_parallel_decode(model, self.omni)
        decodes = self.tp.is_first_rank or shares_decode
        self.chunk_end = ChunkEnd(
            self.model,
            self.agreement,
            self._in_flight,
            self._results,
            decodes=decodes and self._ends_steps and not self.omni.vae_stage,
            shares_decode=shares_decode,
            overlap=self._overlap_decode,
        )
        if self.omni.vae_stage:
            self._vae_stage = self._make_vae_stage(model)

    def reload_weights(
        self, weights_iterator: Any = None, weights_path: str | None = None, is_checkpoint_format: bool = True
    ) -> None:
        """Load the checkpoint again, in place (after sleep level 2, or from another directory of the same shape)."""
        if weights_iterator is not None or not is_checkpoint_format:
            raise ValueError("reload_weights takes a checkpoint directory (weights_path) or nothing, no iterator")
        if weights_path is not None:
            self.model_config.model = weights_path
        get_model_loader(self.load_config).load_weights(self.model, self.model_config)

    def _make_vae_stage(self, model: Any) -> VAEStage | None:
        if not isinstance(model, SupportsVAEStage):
            raise ValueError(f"omni.vae_stage: the decoder of {type(model).__name__} cannot be a stage of its own")
        if not self.pp.is_last_rank:
            return None
        results = self._results if self.tp.is_first_rank or self.shares_decode else None
        agreement = self.agreement if self.shares_decode else None
        return VAEStage(self.model, self.sessions, self._in_flight, self.chunk_end.commit, results, agreement)

    def get_model(self) -> Any:
        return self.model

    @property
    def shares_decode(self) -> bool:
        """Whether the ranks that share layers decode together, each its part."""
        return self.chunk_end.shares_decode

    def connect_stages(self) -> None:
        """Open the way from stage to stage, and back between those with layers. Collective, before the first chunk."""
        connect_forward(self.pp, self.device)
        if self._num_stages > 1:
            self._channel = ReturnChannel(self.pp.ranks[: self._num_stages], self.device)

    # -- the engine step ---------------------------------------------------------------------------------------

    def execute_model(
        self, scheduler_output: "SchedulerOutput", intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput | IntermediateTensors:
        """One engine step: one micro-step for each scheduled request (a whole chunk under the stock scheduler)."""
        scheduled = list(scheduler_output.num_scheduled_tokens)
        self.take_answers([*scheduler_output.finished_req_ids, *scheduled])
        for request_id in scheduler_output.finished_req_ids:
            self.admission.release(self.requests.remove(request_id))
        for data in scheduler_output.scheduled_new_reqs:
            self.requests.add(data)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT

        states = [self.requests[request_id] for request_id in scheduled]
        outputs: dict[str, torch.Tensor] = {}
        self.chunk_end.begin_step()
        if self.step_at_a_time:
            due = [state for state in states if state.done and state.pending is not None]
            paced = self._hands_over and not all(state.done for state in states)
            if paced:
                self._pacer.wait(hurry=False)
            if self.pp.world_size == 1:
                self._pacer.launching()
            hidden = self.micro_step(states, intermediate_tensors, outputs)
            if self._vae_stage is not None:
                due = self._vae_stage.ready(due, alone=len(due) == len(states))
            elif paced or not self._hands_over:
                self._pacer.launched()
            # This step's work is queued: the device is busy while the host takes in earlier results.
            outputs.update({state.request_id: state.pending.envelope() for state in due if state.pending is not None})
            if self._vae_stage is None and not self._hands_over:
                self._pacer.wait(hurry=bool(outputs))
            if hidden is not None:
                return hidden
            outputs = deliverable(states, outputs)
        else:
            for state in sorted(states, key=_chunk_order):  # chunks of one session one after the other
                while state.request_id not in outputs:
                    self.micro_step([state], None, outputs)
        return StepOutput(
            req_ids=scheduled,
            req_id_to_index={request_id: index for index, request_id in enumerate(scheduled)},
            pooler_output=[outputs.get(request_id) for request_id in scheduled],
            denoised=tuple(self.chunk_end.denoised),
            committed=tuple(self.chunk_end.committed),
            steps_behind=self._in_flight.steps_behind,
            progress={
                state.request_id: self._progress(state.chunk) for state in states if state.chunk and not state.done
            },
            before_s=self._pacer.before_s,
            unfinished=self._pacer.unfinished,
        )

    def _progress(self, chunk: DiffusionRequest) -> ChunkProgress:
        return ChunkProgress(chunk.step, chunk.num_steps, self.model.latents(chunk).numel() if chunk.step else 1)

    def micro_step(
        self,
        states: Sequence[RequestState],
        received: IntermediateTensors | None,
        outputs: dict[str, torch.Tensor],
    ) -> IntermediateTensors | None:
        """Advance each request by one denoise step; finished and failed ones leave their envelope in `outputs`.

        Returns what the next pipeline stage needs, or None on the last stage.
        """
        if self._vae_stage is not None:
            self._follow(self._vae_stage, states, received, outputs)
            return None
        # The same list on every rank; a finished chunk may be here once more to deliver a result held back.
        chunks = [state for state in states if not state.is_session_operation and not state.done]
        mask = None if received is None else self.agreement.read_mask(received.tensors, chunks)
        waiting = self._in_flight.waiting(chunks) if mask is None else self.agreement.waiting(chunks, mask)
        indices = self.agreement.indices(chunks, mask)
        for state in states:
            if state.failure is None and state.chunk is None and state not in waiting:
                self.admission.admit(state, outputs, indices.get(state.request_id))
        alive = self.agreement.alive(chunks, waiting, mask)
        limit = 1 if self.omni.batch_invariant else self.omni.max_requests_per_step
        groups = group_requests(self.model, [state.chunk for state in alive if state.chunk], limit)
        by_id = {state.request_id: state for state in alive}
        arrived: Sequence[torch.Tensor | None] = [None] * len(groups)
        if received is not None:
            arrived = unpack(_HIDDEN, received.tensors)
        handed_on: list[torch.Tensor] = []
        for group, hidden in zip(groups, arrived, strict=True):
            self.chunk_end.decode_before_clean_pass([by_id[request.request_id] for request in group])
            result = self._forward([by_id[request.request_id] for request in group], hidden)
            if not self._ends_steps:
                assert result is not None
                handed_on.append(result)
                assert self._channel is not None
                self._channel.expect(group)
            else:
                self._after_step([by_id[request.request_id] for request in group], outputs)
        if not self._ends_steps:
            hidden_states = together(_HIDDEN, handed_on, self.tp.world_size)
            return IntermediateTensors(hidden_states | self.agreement.mask(chunks, alive, waiting))
        if self.omni.vae_stage:
            failed = [state for state in states if state.failure is not None and state not in alive]
            return hand_over(self.model, self._in_flight, [*alive, *failed], self.tp.world_size)
        self.chunk_end.pack_failures(states, outputs)
        return None

    def _follow(
        self,
        vae_stage: VAEStage,
        states: Sequence[RequestState],
        received: IntermediateTensors | None,
        outputs: dict[str, torch.Tensor],
    ) -> None:
        """The VAE stage's micro-step."""
        assert received is not None
        note = StageNote.read(received.tensors)
        vae_stage.fail(states, note)
        for state in states:
            # A chunk that the ranks with layers still hold back, or have refused, does not begin here either.
            begins = state.is_session_operation or state.request_id in note.taking_part
            if state.failure is None and state.chunk is None and begins:
                self.admission.admit(state, outputs)
        for state in vae_stage.advance(states, note, note.latents(received.tensors)):
            self.chunk_end.hand_out(state, outputs)
        self.chunk_end.pack_failures(states, outputs)

    def _forward(self, states: Sequence[RequestState], hidden: torch.Tensor | None) -> torch.Tensor | None:
        """One forward for one batch; on one rank, an exception costs only the request that causes it."""
        batch = [state.chunk for state in states if state.chunk is not None]
        try:
            with contextlib.ExitStack() as timed:
                for request in batch:
                    timed.enter_context(request.timer.stage("steps"))
                if self._temporal is not None:
                    result = self._temporal.step(self.model, batch, hidden)
                else:
                    result = self.model.denoise_step(batch, hidden)
                    if self._ends_steps:
                        self.model.step_scheduler(batch, result)
        except Exception as error:
            if get_world_group().world_size > 1:
                raise  # other ranks are inside this batch's collectives: only a clean death is left
            if len(states) > 1:
                for state in states:
                    self._forward([state], hidden)
            else:
                states[0].failure = as_failure(error, states[0].request_id)
            return None
        for state, request in zip(states, batch, strict=True):
            request.step += 1
            if self._ends_steps and request.step == request.num_steps - request.clean_passes:
                state.finite = FiniteCheck(self.model.latents(request))
        return result

    def _after_step(self, states: Sequence[RequestState], outputs: dict[str, torch.Tensor]) -> None:
        """Last stage: finish the chunks whose steps are done, tell the earlier stages."""
        for state in states:
            if state.done and state.failure is None:
                self.chunk_end.finish(state, outputs)
        if self._channel is not None:
            requests = [state.chunk for state in states if state.chunk is not None]
            answer = self.model.latents if self._temporal is None else self._temporal.answer
            self._channel.send(
                requests, [state.failure is None for state in states], [answer(request) for request in requests]
            )

    def request_progress(self) -> dict[str, list[int]]:
        return self.requests.progress()

    def settle(self, session_id: str) -> None:
        """Earlier stage: take in the last stage's answers to this session's finished chunks, and so commit them."""
        done = [
            state.request_id
            for state in self.requests
            if state.done and state.chunk is not None and state.chunk.session.session_id == session_id
        ]
        with torch.inference_mode():  # as every commit
            self.take_answers(done)

    def take_answers(self, request_ids: Iterable[str]) -> None:
        """Earlier stage: take in the last stage's answers up to the newest that concerns one of `request_ids`."""
        if self._channel is not None and not self._ends_steps:
            self._channel.drain(request_ids, self._take_answer)

    def listen_for_answers(self) -> None:
        """Earlier stage: to be called whenever hidden states have been sent (`ReturnChannel.listen`)."""
        if self._channel is not None:
            self._channel.listen(self.model)

    def _take_answer(self, request: DiffusionRequest, ok: bool, latents: torch.Tensor) -> None:
        """Earlier stage: the last stage has finished a step of `request`."""
        if request.state is None:
            return  # aborted or finished meanwhile
        self.model.set_latents(request, latents.view(self.model.latents(request).shape))
        if request.step >= request.num_steps:
            if ok:
                self.chunk_end.commit(request)
            else:
                self._in_flight.fail(request)

    def shutdown(self) -> None:
        self.sessions.close_all()


def _chunk_order(state: RequestState) -> tuple[str, float]:
    params = state.params
    if params is None:
        return ("", 0.0)
    return (params.session_id, float("inf") if params.chunk_index is None else params.chunk_index)
