# SPDX-License-Identifier: Apache-2.0
"""`RequestStates`: the chunks in flight on one rank, from the scheduler's first mention to its
last.

A request that cannot be read becomes a failed state instead of an exception: one request's error is
one request's error. Workers and the executor without workers share it. Held by
tests/model_executor/test_requests.py.
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
    """One scheduled request.

    `chunk` exists from admission on; `failure` ends the request at its next output.
    """

    request_id: str
    params: DiffusionParams | None
    tensors: dict[str, torch.Tensor]
    chunk: DiffusionRequest | None = None
    lora_request: LoRARequest | None = None
    """The adapter that the request names by vLLM's own argument."""
    index: int = 0
    """Of the chunk in its session."""
    opened_session: bool = False
    failure: RequestFailed | None = None
    finite: FiniteCheck | None = None
    """Whether the latents are finite, while the chunk nears its end."""
    pending: PendingResult | None = None
    """The chunk's result, on its way to the host; delivered when the chunk is done."""
    decode_failure: RequestFailed | None = None
    """Why there is no `pending`: the decode of the final latents failed; the chunk fails after
    its last step.
    """
    deferred: torch.Tensor | None = None
    """A finished envelope that waits for room in the next step's message."""
    degradations: tuple[str, ...] = ()
    """Degradations that the scheduler has chosen for the chunk."""
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def is_session_operation(self) -> bool:
        """`reset`, `close` or `fork`: no chunk is computed."""
        return self.params is not None and self.params.op != "generate"

    @property
    def done(self) -> bool:
        return self.chunk is not None and 0 < self.chunk.num_steps <= self.chunk.step


class RequestStates(dict[str, RequestState]):
    """Request id -> its state, oldest first."""

    def add_request(self, data: NewRequestData) -> RequestState:
        """Read a newly scheduled request; a malformed one becomes a state with `failure` set."""
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
        """`{session id: [steps done, steps in all]}` of the chunks in flight (vLLM renames
        request ids).
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


def as_failure(error: Exception, request_id: str) -> RequestFailed:
    """Map an exception to an error for the client: `RequestFailed` unchanged, any other without its
    text.

    request_id: vLLM's; it contains the ids that the client knows.
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

    Each batch shares a forward pass, at whatever denoise step its requests are. The order is the
    scheduler's, so every rank builds the same batches.

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
