# SPDX-License-Identifier: Apache-2.0
"""`DiffusionGPUModelRunner`: runs denoise steps for scheduled requests and owns the device memory.

In each engine step, the runner's role admits the scheduled requests and runs one step for each of
them. The role (`roles/`) is chosen once at startup; it defines the work of this rank and the
messages to other ranks. The runner has no vLLM base class: `surface.py` implements vLLM's runner
interface. This module does not depend on a model or on sockets.

Invariants, tested in tests/worker/test_diffusion_model_runner.py,
tests/worker/test_decode_before_clean_pass.py and tests/engine/:
- A session is created by its first chunk, a fork or a restore. Only the session store frees a
  session that it holds; `SessionSnapshots.load` and `SuspendedFiles.read` free a session that could
  not be restored.
- A request that fails or is aborted leaves its session unchanged; the rest of the batch continues.
- With several ranks, every decision before a collective is the same on all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.offloader import set_offloader
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_omni.config import OmniConfig
from vllm_omni.core.step_protocol import ChunkProgress, StepOutput
from vllm_omni.model_executor.checkpoint.tensor_files import files_may_change
from vllm_omni.model_executor.interfaces import PoolsMemory, SupportsStepExecution
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.linear.linear import check_reloadable, quantized_layers
from vllm_omni.model_executor.layers.lora.store import store_for
from vllm_omni.model_executor.layers.offload import offloader_for
from vllm_omni.model_executor.requests import RequestState, RequestStates
from vllm_omni.model_executor.vllm_model import driven_model
from vllm_omni.model_executor.whole_request import in_steps
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.decode import ChunkEnd
from vllm_omni.worker.diffusion.roles import role_for
from vllm_omni.worker.diffusion.roles.role import RankParts
from vllm_omni.worker.diffusion.sessions.store import SessionStore, Suspension
from vllm_omni.worker.diffusion.surface import RunnerSurface


class DiffusionGPUModelRunner(RunnerSurface):
    """Model runner of one rank. The worker calls all methods from the same thread."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.load_config = vllm_config.load_config
        self.device = device
        self.omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        self.pp, self.tp = get_pp_group(), get_tp_group()
        self.parallel = ParallelContext.from_vllm(vae_stage=self.omni.vae_stage)
        self.agreement = RankAgreement(self.tp, get_world_group())
        self.requests = RequestStates()
        self.sessions = SessionStore(
            self.omni.max_sessions, self.omni.session_idle_s, clock=self.agreement.clock
        )
        if self.omni.suspend_idle_s is not None:
            self.sessions.suspension = Suspension(
                self.omni.suspend_idle_s, self.omni.max_suspended_bytes, self.device
            )
        self.partition = self.omni.partition
        """Current number of layers in each stage, which may have changed since the model was
        loaded. () means that layers are distributed as evenly as possible.
        """

    # -- start, called by the worker ---------------------------------------------------------------

    def load_model(self, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            self.load_config.load_format = "dummy"
        self.offloader = offloader_for(self.vllm_config, self.device, self.parallel)
        # The offloader is set even if it is None, because another engine in this process may have
        # set one.
        set_offloader(self.offloader)
        loader = get_model_loader(self.load_config)
        self.pipeline = loader.load_model(
            vllm_config=self.vllm_config, model_config=self.model_config
        )
        self.network = driven_model(self.pipeline)
        self.adapters = store_for(self.network, self.vllm_config.lora_config, self.device)
        weights = sum(p.numel() * p.element_size() for p in self.network.parameters())
        if self.offloader is not None:
            self.offloader.post_init()
            weights += self.offloader.slot_bytes - self.offloader.host_bytes
        self.model_memory_usage = weights + self.adapters.nbytes
        self.model = in_steps(self.network)
        if isinstance(self.model, PoolsMemory):
            self.sessions.trim_pool = self.model.trim_pool
        self.parts = RankParts.of_config(
            self.vllm_config,
            self.network,
            self.model,
            self.adapters,
            self.device,
            self.parallel,
            self.agreement,
            self.sessions,
        )
        self.admission = self.parts.admission
        self.role = role_for(self.parts)

    def reload_weights(
        self,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Reload the weights in place, after sleep level 2 or from another checkpoint.

        All sessions are closed, because their keys and values were computed with the old weights.

        Args:
            weights_iterator: vLLM's argument, which is not supported and must be None.
            weights_path: Checkpoint directory with tensors of the same shapes, or None to reload
                the current directory.
            is_checkpoint_format: vLLM's argument, which must be true.

        Raises:
            ValueError: The arguments or the quantized layers are not supported.
        """
        if weights_iterator is not None or not is_checkpoint_format:
            raise ValueError(
                "reload_weights takes a checkpoint directory (weights_path) or nothing, no iterator"
            )
        with (
            set_current_vllm_config(self.vllm_config),
            self.adapters.detached(),
            files_may_change(),
        ):
            quantized = quantized_layers(self.network)
            check_reloadable(quantized)
            self._end_sessions()
            if weights_path is not None:
                self.model_config.model = weights_path
            initialize_layerwise_reload(quantized)
            try:
                get_model_loader(self.load_config).load_weights(self.pipeline, self.model_config)
            finally:  # also restores the old weights of layers that received no new ones
                finalize_layerwise_reload(quantized, self.model_config)
                if self.offloader is not None:
                    self.offloader.post_init()

    def _end_sessions(self) -> None:
        """Close all sessions, and fail the chunks in flight. All ranks do the same."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # because a decode may still be running
        self.requests.fail_chunks(
            "cancelled", "the weights were replaced during this chunk; start again"
        )
        self.sessions.close_all()
        self.sessions.trim_pool(0)

    def get_model(self) -> SupportsStepExecution:
        return self.model

    @property
    def chunk_end(self) -> ChunkEnd:
        """The object that this rank's role uses to finish chunks."""
        return self.role.chunk_end

    # -- the engine step ---------------------------------------------------------------------------

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> ModelRunnerOutput | IntermediateTensors:
        """Run one micro-step for each scheduled request.

        If vLLM's own scheduler is used, this method runs whole chunks instead.
        """
        scheduled = list(scheduler_output.num_scheduled_tokens)
        self.role.receive_results([*scheduler_output.finished_req_ids, *scheduled])
        for request_id in scheduler_output.finished_req_ids:
            self.admission.release(self.requests.pop(request_id, None))
        for data in scheduler_output.scheduled_new_reqs:
            self.requests.add_request(data)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        states = [self.requests[request_id] for request_id in scheduled]
        self.role.chunk_end.start_step()
        result = self.role.step(states, intermediate_tensors)
        if isinstance(result, IntermediateTensors):
            return result
        return self._output(states, result)

    def _output(
        self, states: Sequence[RequestState], outputs: dict[str, torch.Tensor]
    ) -> StepOutput:
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
            lag_steps=self.parts.in_flight.order.lag_steps,
            progress=progress,
            before_s=pacer.before_s,
            unfinished=pacer.unfinished,
        )

    # -- between steps, called by the worker -------------------------------------------------------

    def request_progress(self) -> dict[str, list[int]]:
        return self.requests.progress()

    def settle(self, session_id: str) -> None:
        """Commit the finished chunks of a session by applying the return messages from the last
        stage.
        """
        with torch.inference_mode():  # because every commit runs in inference mode
            self.role.receive_results(self.requests.done_in(session_id))

    def shutdown(self) -> None:
        self.sessions.close_all()

    # -- adapters, called by vLLM ------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check and load a LoRA adapter on all ranks, or on none (collective).

        Raises:
            ValueError: A rank could not load the adapter. The message is one line.
        """
        return self.agreement.add_adapter(self.adapters, lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        return self.adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        return lora_id in self.adapters.ids()

    def list_loras(self) -> set[int]:
        return self.adapters.ids()
