# SPDX-License-Identifier: Apache-2.0
"""`ARHiddenStatesScheduler`: delivers the AR worker's hidden states to the client together with the
text.

In stock vLLM, a tensor in `ModelRunnerOutput.pooler_output` finishes a request and replaces its
text. This scheduler removes the tensors before vLLM's code reads them, stores each request's hidden
states until its tokens leave the engine, and attaches them to those tokens
(`vllm_omni.hidden_states.encode_hidden_states`). The scheduler differs from vLLM's only in the
following ways:

- A request for the hidden states of all tokens does not read the prefix cache, because cached
  tokens are not computed and would have no hidden states.
- Each token's hidden state is sent once, in position order, even after a preemption that recomputes
  tokens.
- A request finishes with the `finish_reason` "error" and the error as its stop reason in three
  cases: its hidden states exceed `omni.max_hidden_states_bytes`, the worker refused it, or it
  arrived over HTTP at a server without an endpoint for hidden states. All other requests continue.

The scheduler works with and without async scheduling. Requests that do not ask for hidden states
are scheduled as in stock vLLM.
"""

import os
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.config import OmniConfig
from vllm_omni.hidden_states import HiddenStatesRequest, encode_hidden_states, error_text
from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.runtime.processes import end_with_parent

_HTTP_REQUESTS: Final = (
    "cmpl-",
    "chatcmpl-",
    "resp_",
    "generate-tokens-",
    "transcribe-",
    "translate-",
)
"""Prefixes of the request ids that vLLM's text endpoints assign."""


@dataclass
class _PendingStates:
    """One request's progress, and its hidden states that have not yet left the engine."""

    request: Request
    """The vLLM request to which the hidden states belong."""
    requested: HiddenStatesRequest
    """Which hidden states the client requested."""
    computed: int = 0
    """Number of tokens computed so far. The number decreases when a preempted request restarts."""
    next_position: int = 0
    """Position of the first token whose hidden state has not yet been stored."""
    num_bytes: int = 0
    """Size of all hidden states stored so far, in bytes."""
    held: list[torch.Tensor] = field(default_factory=list)
    """Stored hidden states that have not been sent."""
    positions: list[int] = field(default_factory=list)
    """Position of each stored hidden state."""


class ARHiddenStatesScheduler(Scheduler):
    def __new__(
        cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any
    ) -> "ARHiddenStatesScheduler":
        if vllm_config.scheduler_config.async_scheduling and not issubclass(cls, AsyncScheduler):
            return super().__new__(_AsyncARHiddenStatesScheduler)
        return super().__new__(cls)

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        end_with_parent()
        if self.return_sampling_mask:
            raise ValueError(
                "ARHiddenStatesScheduler sends hidden states in the field of "
                "--return-sampling-mask: use one of them"
            )
        self._max_bytes = OmniConfig.from_additional_config(
            vllm_config.additional_config
        ).max_hidden_states_bytes
        self._pending: dict[str, _PendingStates] = {}
        named = os.environ.get("VLLM_PLUGINS", "").split(",")
        self._has_endpoint = any(name.startswith("vllm_omni_") for name in named)
        """Whether the API server has an endpoint that can deliver hidden states. vLLM loads the
        endpoint plugins named in `VLLM_PLUGINS`.
        """

    def add_request(self, request: Request) -> None:
        requested = _requested_by(request)
        if requested is not None and request.request_id not in self._pending:
            if requested.hidden_states == "all":
                request.skip_reading_prefix_cache = True
            self._pending[request.request_id] = _PendingStates(request, requested)
        super().add_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._pending.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        entries = model_runner_output.pooler_output
        if entries is None and not self._pending:
            return super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.pooler_output = None
        taken, failed = self._take(scheduler_output, model_runner_output, entries)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for engine_outputs in outputs.values():
            for output in engine_outputs.outputs:
                if (
                    states := taken.get(output.request_id)
                ) is not None and output.request_id not in failed:
                    _attach(states, output)
        if failed:
            self._finish_failed(failed, outputs)
        return outputs

    def _take(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        entries: list[torch.Tensor | None] | None,
    ) -> tuple[dict[str, _PendingStates], dict[str, RequestFailed]]:
        """Store the hidden states computed in this step.

        Returns:
            The scheduled requests that ask for hidden states and the error of each failed request,
            both by request id.
        """
        restarts = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                restarts[req_id] = num_computed
        concerned: dict[str, _PendingStates] = {}
        failed: dict[str, RequestFailed] = {}
        for req_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            index = model_runner_output.req_id_to_index.get(req_id)
            entry = None if entries is None or index is None else entries[index]
            if entry is not None and entry.dtype == torch.uint8:
                failed[req_id] = _error_in(entry)
                continue
            states = self._pending.get(req_id)
            if states is None or index is None:
                continue
            if not self._has_endpoint and req_id.startswith(_HTTP_REQUESTS):
                failed[req_id] = RequestFailed(
                    "unsupported",
                    "this server has no endpoint for hidden states: start it with "
                    "VLLM_PLUGINS=vllm_omni_ar",
                )
                continue
            sampled = model_runner_output.sampled_token_ids
            num_sampled = len(sampled[index]) if sampled else 0
            num_drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(req_id, ()))
            rejected = num_drafts - (num_sampled - 1) if num_drafts and num_sampled else 0
            states.computed = restarts.get(req_id, states.computed) + num_scheduled - rejected
            concerned[req_id] = states
            if entry is not None:
                failure = self._hold(states, entry)
                if failure is not None:
                    failed[req_id] = failure
        return concerned, failed

    def _hold(self, states: _PendingStates, entry: torch.Tensor) -> RequestFailed | None:
        """Store the hidden states of the tokens for which none have been stored yet.

        Args:
            states: The request's progress.
            entry: Hidden states of the last tokens that this step computed.

        Returns:
            The error if the request's hidden states exceed the size limit, otherwise None.
        """
        first = states.computed - len(entry)
        entry = entry[max(0, states.next_position - first) :]
        if not len(entry):
            return None
        if states.requested.hidden_states == "last":
            states.held.clear()
            states.positions.clear()
            states.num_bytes = 0
        states.num_bytes += entry.nbytes
        if states.num_bytes > self._max_bytes:
            return RequestFailed(
                "too_large",
                f"{states.num_bytes} bytes of hidden states at token {states.computed} exceed the "
                "limit of "
                f"{self._max_bytes} bytes per request (omni.max_hidden_states_bytes): request "
                "fewer layers, "
                "`generated` or `last` hidden states, or fewer tokens",
            )
        states.held.append(entry)
        states.positions.extend(range(states.computed - len(entry), states.computed))
        states.next_position = states.computed
        return None

    def _finish_failed(
        self, failed: dict[str, RequestFailed], outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """Finish requests with an error.

        Tokens sampled for these requests in this step are still delivered.
        """
        requests = {req_id: self.requests[req_id] for req_id in failed if req_id in self.requests}
        self.finish_requests(requests, RequestStatus.FINISHED_ERROR)
        for req_id, request in requests.items():
            engine_outputs = outputs.setdefault(request.client_index, EngineCoreOutputs())
            output = next((out for out in engine_outputs.outputs if out.request_id == req_id), None)
            if output is None:
                output = EngineCoreOutput(
                    req_id, [], events=request.take_events(), trace_headers=request.trace_headers
                )
                engine_outputs.outputs = [*engine_outputs.outputs, output]
            output.finish_reason = FinishReason.ERROR
            output.stop_reason = error_text(failed[req_id])
        for client_index, finished in (self.finished_req_ids_dict or {}).items():
            engine_outputs = outputs.setdefault(client_index, EngineCoreOutputs())
            engine_outputs.finished_requests = (
                engine_outputs.finished_requests or set()
            ) | finished
        if self.finished_req_ids_dict:
            self.finished_req_ids_dict.clear()


class _AsyncARHiddenStatesScheduler(ARHiddenStatesScheduler, AsyncScheduler):
    """`ARHiddenStatesScheduler` on top of vLLM's asynchronous scheduler, which schedules one step
    ahead.
    """


def _requested_by(request: Request) -> HiddenStatesRequest | None:
    """Return a request's `HiddenStatesRequest`.

    The result is None if the request does not ask for hidden states, or if the parameter is
    malformed. The worker refuses requests with a malformed parameter.
    """
    if request.sampling_params is None:
        return None
    try:
        return HiddenStatesRequest.from_extra_args(request.sampling_params.extra_args)
    except RequestFailed:
        return None


def _error_in(envelope: torch.Tensor) -> RequestFailed:
    try:
        unpack(envelope)
    except RequestFailed as failed:
        return failed
    return RequestFailed("internal", "the worker returned an envelope without an error")


def _attach(states: _PendingStates, output: EngineCoreOutput) -> None:
    """Attach the stored hidden states to an output, except those of tokens after the end of the
    request.

    If only the last hidden state was requested, it is attached only to the last output, or to every
    output if the front end may finish the request.
    """
    num_tokens = len(output.new_token_ids)
    known = states.request.num_tokens - 1
    keep = sum(position < known for position in states.positions)
    last_only = states.requested.hidden_states == "last"
    if (
        not keep
        or not num_tokens
        or (last_only and output.finish_reason is None and not _stops_in_front(states))
    ):
        return
    held = torch.cat(states.held)[:keep]
    positions = states.positions[:keep]
    states.held.clear()
    states.positions.clear()
    token_ids = [states.request.all_token_ids[position] for position in positions]
    output.new_sampling_mask = encode_hidden_states(
        held, states.requested.layers, positions, token_ids, num_tokens, last_only
    )


def _stops_in_front(states: _PendingStates) -> bool:
    """Return whether stop strings may make the front end finish the request.

    Every output of such a request needs its hidden states, because any output may be the last.
    """
    params = states.request.sampling_params
    return params is not None and bool(params.stop)
