# SPDX-License-Identifier: Apache-2.0
"""`RequestStates`: the requests on one rank, from the time they are first scheduled until they
finish.

If a request cannot be parsed, the error is stored in `RequestState.failure` rather than raised, so
that other requests are not affected. The diffusion worker and the diffusers executor both use this
module.
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
    """State of one scheduled request."""

    request_id: str
    """vLLM's id for the request."""
    params: DiffusionParams | None
    """Parameters of the request, or None if the request could not be parsed."""
    tensors: dict[str, torch.Tensor]
    """Input tensors of the request, keyed by name."""
    chunk: DiffusionRequest | None = None
    """Chunk that the request generates, or None if the request has not been admitted."""
    lora_request: LoRARequest | None = None
    """LoRA adapter selected with vLLM's own `lora_request` argument."""
    index: int = 0
    """Index of the chunk in its session."""
    opened_session: bool = False
    """Whether the request has created its session."""
    failure: RequestFailed | None = None
    """Error to return as the request's next and last output."""
    finite: FiniteCheck | None = None
    """Check of the final latents for NaN and Inf, launched before the chunk ends."""
    pending: PendingResult | None = None
    """Result that the device is decoding or copying to the host. The result is delivered when the
    chunk is done.
    """
    decode_failure: RequestFailed | None = None
    """Error that the decode raised. A chunk with such an error fails after its last step."""
    deferred: torch.Tensor | None = None
    """Finished envelope that did not fit into its engine step's message and is sent with the next
    step instead.
    """
    degradations: tuple[str, ...] = ()
    """Degradations that the scheduler has chosen for the chunk."""
    started_s: float = field(default_factory=time.perf_counter)
    """Time when the request was first scheduled, in seconds, from `time.perf_counter`."""

    @property
    def is_session_operation(self) -> bool:
        """Return whether the request is a `reset`, `close` or `fork` operation, which computes no
        chunk.
        """
        return self.params is not None and self.params.op != "generate"

    @property
    def done(self) -> bool:
        return self.chunk is not None and 0 < self.chunk.num_steps <= self.chunk.step


class RequestStates(dict[str, RequestState]):
    """States of all requests, keyed by request id, oldest request first."""

    def add_request(self, data: NewRequestData) -> RequestState:
        """Parse a newly scheduled request. The error for a malformed request is stored in
        `failure`.
        """
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
        except Exception:  # boundary: a malformed request must not affect other requests
            logger.exception("request %s could not be read", data.req_id)
            unreadable = RequestFailed("invalid_request", "the request could not be read")
            state = RequestState(data.req_id, None, {}, failure=unreadable)
        self[data.req_id] = state
        return state

    def progress(self) -> dict[str, list[int]]:
        """Return `{session id: [steps done, steps in total]}` for the chunks in flight.

        The keys are session ids instead of request ids, because vLLM renames requests.
        """
        found: dict[str, list[int]] = {}
        # States are ordered oldest first, so the first unfinished chunk of a session is used.
        for state in self.values():
            if state.chunk is not None:
                session_id = state.chunk.session.session_id
                step, num_steps = found.get(session_id, (0, 0))
                if step >= num_steps:
                    found[session_id] = [state.chunk.step, state.chunk.num_steps]
        return found

    def done_in(self, session_id: str) -> list[str]:
        """Return vLLM's ids for a session's requests that have completed their last step."""
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

    `RequestFailed` is returned unchanged. Any other exception becomes a generic error, and its text
    is only logged.

    Args:
        error: Exception to convert.
        request_id: vLLM's id for the request, which contains the client's id.
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
    """Split requests, in order, into batches. All requests in a batch have the same `batch_key` and
    the same adapters.

    The requests of a batch share a forward pass, even if they are at different denoise steps. The
    scheduler's order is preserved, so every rank builds the same batches.

    Args:
        model: Model that defines `batch_key`.
        states: Requests that have a chunk, in the scheduler's order.
        limit: Maximum number of requests in a batch.
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
