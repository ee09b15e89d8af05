# SPDX-License-Identifier: Apache-2.0
"""`StreamBatchScheduler`: one denoise step per engine step, requests at different steps in one batch.

To stock vLLM a pooling request is finished by its first output and has nothing left to compute until then. This
scheduler gives a request that returned no output its one token back, so that it is scheduled again: one token is
one micro-step. What it adds to the stock policy, and nothing else:

- a request never has two micro-steps in flight (the token comes back only with the output);
- within a session, chunks run one after the other in the order of their chunk index (arrival decides between equals);
- the next chunk may start while the last one's result is still on its way (`StepOutput.denoised`);
- at most `omni.max_requests_per_step` requests share a batch (those that only deliver do not count);
- with pipeline parallelism, the live requests are spread over as many batches as there are stages.

It knows requests and sessions by name only. Held by tests/core/test_stream_batch_scheduler.py.
"""

import itertools
import math
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.config import OmniConfig
from vllm_omni.core.step_output import StepOutput


class StreamBatchScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        omni = OmniConfig.from_additional_config(self.vllm_config.additional_config)
        self._max_requests_per_step = omni.max_requests_per_step
        self._num_stages = self.parallel_config.pipeline_parallel_size
        self._arrivals = itertools.count()
        self._turns: dict[str, dict[str, tuple[float, int]]] = {}
        """session id -> {request id: (chunk index, arrival)} of its requests that still have steps to take."""
        self._delivering: set[str] = set()
        """Requests whose chunk is done and whose result is on its way."""

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        session_id, chunk_index = _session_and_chunk(request)
        self._turns.setdefault(session_id, {})[request.request_id] = (chunk_index, next(self._arrivals))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        runnable = len(self._turns)  # one request per session at most
        steps = min(self._max_requests_per_step, math.ceil(runnable / self._num_stages))
        self.max_num_scheduled_tokens = max(1, steps + len(self._delivering))
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                request.num_computed_tokens -= num_tokens
        if isinstance(model_runner_output, StepOutput):
            for request_id in model_runner_output.denoised:
                request = self.requests.get(request_id)
                if request is not None and not request.is_finished():
                    self._end_turn(request)
                    self._delivering.add(request_id)
        return outputs

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Stock hook: may this waiting request start now? Only if it is first in its session."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        session_id, _ = _session_and_chunk(request)
        turns = self._turns[session_id]
        running = {other.request_id for other in self.running}
        if any(request_id in running for request_id in turns):
            return False
        return min(turns, key=turns.__getitem__) == request.request_id

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._end_turn(request)
        self._delivering.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    def _end_turn(self, request: Request) -> None:
        """Let the session's next request go; idempotent."""
        session_id, _ = _session_and_chunk(request)
        turns = self._turns.get(session_id)
        if turns is not None:
            turns.pop(request.request_id, None)
            if not turns:
                del self._turns[session_id]


def _session_and_chunk(request: Request) -> tuple[str, float]:
    """Read the two scheduling fields of a request; a malformed request is its own session (the runner refuses it).

    A request without a chunk index takes its turn by arrival, behind those that name one.
    """
    extra = request.pooling_params.extra_kwargs if request.pooling_params is not None else None
    fields = extra.get("omni") if extra else None
    if not isinstance(fields, dict):
        return request.request_id, math.inf
    session_id, chunk_index = fields.get("session_id"), fields.get("chunk_index")
    return (
        session_id if isinstance(session_id, str) else request.request_id,
        chunk_index if isinstance(chunk_index, int) else math.inf,
    )
