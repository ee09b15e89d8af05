# SPDX-License-Identifier: Apache-2.0
"""`RequestStates`: requests of one rank, from their first scheduling until they finish.

A request that cannot be parsed becomes a failed state instead of an exception, so that it does not
affect other requests. The diffusion worker and the diffusers executor both use this module.
"""

import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import NewRequestData

from vllm_omni.core.step_protocol import SchedulerNote
from vllm_omni.inputs import DiffusionParams, request_tensors
from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution
from vllm_omni.model_executor.results import FiniteCheck, PendingResult
from vllm_omni.multimodal import feature_tensors
from vllm_omni.outputs import RequestFailed

logger = logging.getLogger("vllm." + __name__)


@dataclass(eq=False)
class RequestState:
    """One scheduled request."""

    request_id: str
    """vLLM's id of the request."""
    params: DiffusionParams | None
    """Parameters. None: the request could not be parsed."""
    tensors: dict[str, torch.Tensor]
    """Input tensors by name."""
    chunk: DiffusionRequest | None = None
    """The chunk, once the request is admitted."""
    lora_request: LoRARequest | None = None
    """LoRA adapter selected with vLLM's own argument."""
    index: int = 0
    """Index of the chunk in its session."""
    opened_session: bool = False
    """Whether the request has created its session."""
    failure: RequestFailed | None = None
    """Error that ends the request with its next output."""
    finite: FiniteCheck | None = None
    """Check of the final latents, launched before the end of the chunk."""
    pending: PendingResult | None = None
    """Result that is being decoded or copied to the host. Delivered when the chunk is done."""
    decode_failure: RequestFailed | None = None
    """Error of the decode. The chunk then fails after its last step."""
    deferred: torch.Tensor | None = None
    """Finished envelope that did not fit into the message of this step and is sent in the next
    step.
    """
    degradations: tuple[str, ...] = ()
    """Degradations that the scheduler has chosen for the chunk."""
    started_s: float = field(default_factory=time.perf_counter)
    """Time at which the request was first scheduled, in seconds of `time.perf_counter`."""

    @property
    def is_session_operation(self) -> bool:
        """Return whether the request is `reset`, `close` or `fork` and computes no chunk."""
        return self.params is not None and self.params.op != "generate"

    @property
    def done(self) -> bool:
        return self.chunk is not None and 0 < self.chunk.num_steps <= self.chunk.step


class RequestStates(dict[str, RequestState]):
    """States by request id, oldest first."""

    def add_request(self, data: NewRequestData) -> RequestState:
        """Parse a newly scheduled request. A malformed request gets a state with `failure`."""
        extra = data.pooling_params.extra_kwargs if data.pooling_params is not None else None
        try:
            params = DiffusionParams.from_extra_kwargs(extra)
            tensors = request_tensors(extra)
            if data.mm_features:
                tensors |= feature_tensors(data.mm_features)
            note = SchedulerNote.read_extra_kwargs(extra)
            if note.refused is not None:
                raise RequestFailed("capacity", note.refused)
            state = RequestState(
                data.req_id,
                params,
                tensors,
                lora_request=data.lora_request,
                degradations=tuple(note.degradations),
            )
        except RequestFailed as failure:
            state = RequestState(data.req_id, None, {}, failure=failure)
        except Exception:  # boundary: a malformed request may fail only itself
            logger.exception("request %s could not be read", data.req_id)
            unreadable = RequestFailed("invalid_request", "the request could not be read")
            state = RequestState(data.req_id, None, {}, failure=unreadable)
        self[data.req_id] = state
        return state

    def progress(self) -> dict[str, list[int]]:
        """Return `{session id: [steps done, steps in total]}` of the chunks in flight.

        The key is not the request id, because vLLM renames requests.
        """
        found: dict[str, list[int]] = {}
        # oldest first: of several chunks of a session, the one that is done next
        for state in self.values():
            if state.chunk is not None:
                session_id = state.chunk.session.session_id
                step, num_steps = found.get(session_id, (0, 0))
                if step >= num_steps:
                    found[session_id] = [state.chunk.step, state.chunk.num_steps]
        return found

    def done_in(self, session_id: str) -> list[str]:
        """Return vLLM's ids of the requests of a session that have completed their last step."""
        return [
            state.request_id
            for state in self.values()
            if state.done
            and state.chunk is not None
            and state.chunk.session.session_id == session_id
        ]

    def fail_chunks(self, code: str, message: str) -> None:
        """Fail all chunks that have not completed their last step, unless they have already
        failed.
        """
        for state in self.values():
            if state.chunk is not None and not state.done and state.failure is None:
                state.failure = RequestFailed(code, message)


def as_failure(error: Exception, request_id: str) -> RequestFailed:
    """Convert an exception to an error for the client.

    `RequestFailed` is returned unchanged. The text of other exceptions is only logged.

    Args:
        error: The exception.
        request_id: vLLM's id of the request, which contains the client's id.
    """
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return RequestFailed(
            "oom", "the device ran out of memory on this chunk; the session is unchanged"
        )
    logger.exception("request %s failed", request_id)
    return RequestFailed(
        "engine_error", "the model failed on this chunk; the server's log has the details"
    )


def group_states(
    model: SupportsStepExecution, states: Sequence[RequestState], limit: int
) -> list[list[RequestState]]:
    """Split requests into batches of equal `batch_key` and adapters, in order.

    Each batch shares a forward pass, regardless of the denoise steps of its requests. The order is
    that of the scheduler, so that every rank builds the same batches.

    Args:
        model: Defines `batch_key`.
        states: Requests with a chunk.
        limit: Maximum size of a batch.
    """
    groups: list[list[RequestState]] = []
    open_group: dict[Hashable, list[RequestState]] = {}
    for state in states:
        assert state.chunk is not None
        key = model.batch_key(state.chunk), state.chunk.adapters
        group = open_group.get(key)
        if group is None or len(group) >= limit:
            group = open_group[key] = []
            groups.append(group)
        group.append(state)
    return groups
