# SPDX-License-Identifier: Apache-2.0
"""AR model runner: vLLM's own runner, extended to return the requested hidden states in its output.

There is one mixin per runner generation. A mixin overrides hooks and calls `super()`. The V1 runner
is used on CPUs and for old configurations; the V2 runner is the default on CUDA. vLLM's
preparation, forward pass, sampling, speculation and expert balancing are used unchanged. The mixins
copy hidden states between `execute_model` and `sample_tokens`, when the hidden states of a step
exist but its tokens have not been sampled yet. The mixins must not change any other field of the
output (tests/worker/test_ar_gpu_model_runner.py). The available layers are determined when the
model is loaded (`_make_collector`).
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_omni.worker.ar.hidden_states import (
    CopiedHiddenStates,
    HiddenStateCollector,
    HiddenStatesOutput,
    StepHiddenStates,
)
from vllm_omni.worker.ar.layers import LayerTaps, prepare_stages

# The type is Any, because the runners wrap the overridden methods in torch.inference_mode, which
# hides their signatures.
_Runner: Any = object


class _HiddenStatesMixin(_Runner):
    """Hooks that are the same for both runner generations."""

    hidden_state_collector: HiddenStateCollector
    """Tracks the requested hidden states and copies them."""
    layer_taps: LayerTaps
    """Layers whose hidden states the model returns."""
    use_aux_hidden_state_outputs: bool
    """vLLM's attribute: whether the model returns auxiliary layers."""
    intermediate_tensors: IntermediateTensors | None
    """Buffers for the tensors received from the previous pipeline stage. vLLM defines the
    attribute."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.layer_taps = LayerTaps.install(
            self.vllm_config, self.get_model(), self.use_aux_hidden_state_outputs
        )
        self.hidden_state_collector = _make_collector(self.vllm_config, self.layer_taps)

    def _make_intermediate_tensors(self) -> None:
        self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.hidden_state_collector.update(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        taken = self._copy_hidden_states() if self.hidden_state_collector else None
        output = super().sample_tokens(grammar_output)
        if taken is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return HiddenStatesOutput(output, taken)
        assert isinstance(output, ModelRunnerOutput)
        return taken.attach_to_output(output)

    def _copy_hidden_states(self) -> CopiedHiddenStates | None:
        """Start copying the hidden states of the current step. Returns None if this rank has no
        hidden states.
        """
        raise NotImplementedError


class ARModelRunnerV1Mixin(_HiddenStatesMixin):
    """Mixin for a V1 runner class. List the mixin before the runner class."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        pp = get_pp_group()
        if self.layer_taps.installed:
            # Stages before the last one return intermediate tensors, which include auxiliary
            # layers.
            self.use_aux_hidden_state_outputs = pp.is_last_rank
            if pp.world_size > 1:
                prepare_stages(self.get_model())
            if not (pp.is_first_rank or pp.is_last_rank):
                raise ValueError(
                    "omni.hidden_state_layers: the V1 runner supports at most two pipeline stages"
                )
        if not pp.is_first_rank and self.intermediate_tensors is None:
            # vLLM creates these tensors in its warm-up. The CPU worker skips the warm-up in eager
            # mode if the cache size is given.
            self._make_intermediate_tensors()

    def _copy_hidden_states(self) -> CopiedHiddenStates | None:
        state = self.execute_model_state
        if state is None:  # this is not the last pipeline stage, or nothing was scheduled
            return None
        scheduled = state.scheduler_output.num_scheduled_tokens
        req_ids = list(self.input_batch.req_ids)
        offsets = [0]
        for req_id in req_ids:
            offsets.append(offsets[-1] + scheduled[req_id])
        num_computed = self.input_batch.num_computed_tokens_cpu[: len(req_ids)].tolist()
        drafts = {
            req_id: len(ids)
            for req_id, ids in state.scheduler_output.scheduled_spec_decode_tokens.items()
        }
        sources = self._sources(state.hidden_states, state.aux_hidden_states, offsets[-1])
        return self.hidden_state_collector.copy_step(
            StepHiddenStates(req_ids, offsets, num_computed, drafts, sources)
        )

    def _sources(
        self,
        hidden_states: torch.Tensor | IntermediateTensors,
        requested_layers: list[torch.Tensor] | None,
        num_tokens: int,
    ) -> dict[int, torch.Tensor]:
        """Return the hidden states, keyed by layer index.

        With torchrun, every pipeline stage has its own scheduler, so the last stage broadcasts the
        hidden states to all stages.
        """
        final, retained = (
            self.hidden_state_collector.num_layers,
            self.layer_taps.named(requested_layers),
        )
        if not self.broadcast_pp_output:
            assert isinstance(hidden_states, torch.Tensor)
            return {**retained, final: hidden_states}
        pp = get_pp_group()
        sources = {}
        for layer in sorted(self.hidden_state_collector.layers):
            if pp.is_last_rank:
                states = hidden_states if layer == final else retained[layer]
                assert isinstance(states, torch.Tensor)
                states = states[:num_tokens].contiguous()
            else:
                size = self.model_config.get_hidden_size()
                states = torch.empty(
                    (num_tokens, size), dtype=self.model_config.dtype, device=self.device
                )
            sources[layer] = pp.broadcast(states, src=pp.world_size - 1)
        return sources


class ARModelRunnerV2Mixin(_HiddenStatesMixin):
    """Mixin for a V2 runner class. List the mixin before the runner class."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.layer_taps.installed:
            self.use_aux_hidden_state_outputs = True
            if self.use_pp:
                self._prepare_stages()

    def _prepare_stages(self) -> None:
        assert self.pp_handler is not None
        prepare_stages(self.get_model())
        self.pp_handler.configure_aux_hidden_state_relay(self.get_model())
        if not self.is_first_pp_rank:
            self._make_intermediate_tensors()

    def _copy_hidden_states(self) -> CopiedHiddenStates | None:
        state = self.execute_model_state
        # This is not the last pipeline stage, or nothing was scheduled.
        if state is None or state.hidden_states is None:
            return None
        retained = self.layer_taps.named(state.aux_hidden_states)
        batch = state.input_batch
        per_request = batch.num_draft_tokens_per_req
        drafts = (
            {}
            if per_request is None
            else dict(zip(batch.req_ids, per_request.tolist(), strict=True))
        )
        return self.hidden_state_collector.copy_step(
            StepHiddenStates(
                req_ids=list(batch.req_ids),
                offsets=batch.query_start_loc_np[: batch.num_reqs + 1].tolist(),
                num_computed=batch.num_computed_tokens_np.tolist(),
                num_drafts=drafts,
                sources={**retained, self.hidden_state_collector.num_layers: state.hidden_states},
            )
        )


def _make_collector(vllm_config: VllmConfig, taps: LayerTaps) -> HiddenStateCollector:
    """Create the collector for this rank.

    The function determines which layers requests may use, and whether this rank copies hidden
    states.
    """
    external = vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
    copies = external or get_tp_group().rank_in_group == 0
    layers = (*taps.layers, taps.num_layers)
    return HiddenStateCollector(taps.num_layers, layers, _refusal(vllm_config), copies=copies)


def _refusal(vllm_config: VllmConfig) -> str | None:
    """Return the reason why a configuration cannot return hidden states, or None if it can.

    With such a configuration, hidden states would be missing or assigned to the wrong tokens.
    """
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if vllm_config.model_config.is_encoder_decoder or vllm_config.model_config.is_diffusion:
        return "hidden states of encoder-decoder and diffusion language models are not supported"
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        return "--kv-sharing-fast-prefill does not compute the hidden states of all prompt tokens"
    if parallel.prefill_context_parallel_size > 1:
        return "prefill context parallelism distributes a prompt's hidden states over ranks"
    if speculative is not None and speculative.enable_adaptive_verification:
        return "adaptive verification of drafts reorders hidden states on the device only"
    return None
