# SPDX-License-Identifier: Apache-2.0
"""`DiffusionGPUModelRunner`: runs denoise steps for the requests the scheduler picked; owns device memory.

Requests come in, its role admits them and runs one step, outputs go out. The role (`roles/`), chosen once at start,
knows this rank's part of the work and its messages to other ranks. The runner has no vLLM base class: `surface.py`
implements vLLM's runner interface. It knows no model by name and no sockets.

Invariants (tests/worker/test_diffusion_model_runner.py, test_decode_before_clean_pass.py there, tests/engine/):
- a session is opened by its first chunk and freed by the store, nowhere else;
- a request that fails or is aborted leaves its session as it was; the others in its batch go on;
- with several ranks, every decision before a collective is the same on all of them.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.offloader import set_offloader
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_omni.config import OmniConfig
from vllm_omni.core.step_protocol import ChunkProgress, StepOutput
from vllm_omni.model_executor.interfaces import KeepsMemory, SupportsStepExecution
from vllm_omni.model_executor.layers.linear import check_reloadable, quantized_layers
from vllm_omni.model_executor.layers.offload import offloader_for
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.lora.store import store_for
from vllm_omni.model_executor.requests import RequestState, RequestStates
from vllm_omni.model_executor.vllm_model import driven_model
from vllm_omni.model_executor.whole_request import in_steps
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.decode import ChunkEnd
from vllm_omni.worker.diffusion.roles import role_for
from vllm_omni.worker.diffusion.roles.role import RankParts
from vllm_omni.worker.diffusion.sessions import SessionStore
from vllm_omni.worker.diffusion.surface import RunnerSurface


class DiffusionGPUModelRunner(RunnerSurface):
    """One rank's runner. All methods are called by the worker from one thread."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.load_config = vllm_config.load_config
        self.device = device
        self.omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        self.pp, self.tp = get_pp_group(), get_tp_group()
        self.place = ParallelContext.from_vllm(vae_stage=self.omni.vae_stage)
        self.agreement = RankAgreement(self.tp, get_world_group())
        self.requests = RequestStates()
        clock = time.monotonic if get_world_group().world_size == 1 else self.agreement.clock
        self.sessions = SessionStore(self.omni.max_sessions, self.omni.session_idle_s, clock=clock)
        self.partition = self.omni.partition
        """Layers of each stage since they were last moved, or as loaded; () = as even as possible."""

    # -- start, called by the worker ----------------------------------------------------------------------------

    def load_model(self, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            self.load_config.load_format = "dummy"
        self.offloader = offloader_for(self.vllm_config, self.device, self.place)
        set_offloader(self.offloader)  # also None: another engine of this process may have had one
        loader = get_model_loader(self.load_config)
        self.pipeline = loader.load_model(vllm_config=self.vllm_config, model_config=self.model_config)
        self.network = driven_model(self.pipeline)
        self.adapters = store_for(self.network, self.vllm_config.lora_config, self.device)
        weights = sum(p.numel() * p.element_size() for p in self.network.parameters())
        if self.offloader is not None:
            self.offloader.post_init()
            weights += self.offloader.slot_bytes - self.offloader.host_bytes
        self.model_memory_usage = weights + self.adapters.nbytes
        self.model = in_steps(self.network)
        if isinstance(self.model, KeepsMemory):
            self.sessions.trim_kept = self.model.trim_kept
        self.parts = RankParts.of(
            self.vllm_config,
            self.network,
            self.model,
            self.adapters,
            self.device,
            self.place,
            self.agreement,
            self.sessions,
        )
        self.admission = self.parts.admission
        self.role = role_for(self.parts)

    def reload_weights(
        self, weights_iterator: Any = None, weights_path: str | None = None, is_checkpoint_format: bool = True
    ) -> None:
        """Load the checkpoint again, in place (after sleep level 2, or from another directory of the same shape)."""
        if weights_iterator is not None or not is_checkpoint_format:
            raise ValueError("reload_weights takes a checkpoint directory (weights_path) or nothing, no iterator")
        with set_current_vllm_config(self.vllm_config), self.adapters.detached():
            quantized = quantized_layers(self.network)
            check_reloadable(quantized)
            if weights_path is not None:
                self.model_config.model = weights_path
            initialize_layerwise_reload(quantized)
            try:
                get_model_loader(self.load_config).load_weights(self.pipeline, self.model_config)
            finally:  # also gives layers that got nothing their old weights back
                finalize_layerwise_reload(quantized, self.model_config)
                if self.offloader is not None:
                    self.offloader.post_init()

    def get_model(self) -> SupportsStepExecution:
        return self.model

    @property
    def chunk_end(self) -> ChunkEnd:
        """How chunks end in this rank's role."""
        return self.role.chunk_end

    # -- the engine step ---------------------------------------------------------------------------------------

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput | IntermediateTensors:
        """One engine step: one micro-step for each scheduled request (a whole chunk under the stock scheduler)."""
        scheduled = list(scheduler_output.num_scheduled_tokens)
        self.role.take_answers([*scheduler_output.finished_req_ids, *scheduled])
        for request_id in scheduler_output.finished_req_ids:
            self.admission.release(self.requests.pop(request_id, None))
        for data in scheduler_output.scheduled_new_reqs:
            self.requests.add(data)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        states = [self.requests[request_id] for request_id in scheduled]
        self.role.chunk_end.begin_step()
        result = self.role.step(states, intermediate_tensors)
        if isinstance(result, IntermediateTensors):
            return result
        return self._output(states, result)

    def _output(self, states: Sequence[RequestState], outputs: dict[str, torch.Tensor]) -> StepOutput:
        pacer, chunk_end = self.role.pacer, self.role.chunk_end
        request_ids = [state.request_id for state in states]
        progress: dict[str, ChunkProgress] = {}
        for state in states:
            chunk = state.chunk
            if chunk is not None and not state.done:
                size = self.model.latents(chunk).numel() if chunk.step else 1
                progress[state.request_id] = ChunkProgress(chunk.step, chunk.num_steps, size)
        return StepOutput(
            req_ids=request_ids,
            req_id_to_index=dict(zip(request_ids, range(len(states)), strict=True)),
            pooler_output=list(map(outputs.get, request_ids)),
            denoised=tuple(chunk_end.denoised),
            committed=tuple(chunk_end.committed),
            steps_behind=self.parts.in_flight.order.steps_behind,
            progress=progress,
            before_s=pacer.before_s,
            unfinished=pacer.unfinished,
        )

    # -- between steps, called by the worker -------------------------------------------------------------------

    def request_progress(self) -> dict[str, list[int]]:
        return self.requests.progress()

    def settle(self, session_id: str) -> None:
        """Apply the last stage's answers to this session's finished chunks, which commits them."""
        done = [
            state.request_id
            for state in self.requests.values()
            if state.done and state.chunk is not None and state.chunk.session.session_id == session_id
        ]
        with torch.inference_mode():  # as every commit
            self.role.take_answers(done)

    def shutdown(self) -> None:
        self.sessions.close_all()

    # -- adapters, by vLLM's calls -------------------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check and load an adapter, on all ranks or on none (collective). Raises ValueError of one line."""
        return self.agreement.add_adapter(self.adapters, lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        return self.adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        return lora_id in self.adapters.ids()

    def list_loras(self) -> set[int]:
        return self.adapters.ids()
