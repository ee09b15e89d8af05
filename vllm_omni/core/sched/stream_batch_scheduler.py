# SPDX-License-Identifier: Apache-2.0
"""`StreamBatchScheduler`: runs one denoise step of each request in a batch per engine step.

The requests in a batch may be at different denoise steps. Stock vLLM computes a pooling request's
tokens once, and the first output finishes the request. After each step, this scheduler therefore
marks the only token of an unfinished request as not computed, so the request is scheduled again:
one token is one micro-step. The scheduler differs from vLLM's only in the following ways:

- A request never has two micro-steps in flight, because its token is reset only when the output of
  the micro-step arrives.
- Chunks of a session run in chunk index order, and in order of arrival if their indices are equal.
  By default, a chunk starts after its predecessor has been committed. With `omni.chunks_in_flight`,
  several chunks are in flight, each `StepOutput.lag_steps` steps behind its predecessor.
- A session's next chunk may start while the result of its last chunk is still being decoded or
  copied (`StepOutput.denoised`).
- The number of requests in a batch exceeds neither `omni.max_requests_per_step` nor
  `--max-num-batched-tokens`. Requests that only deliver a result do not count towards these limits.
- With pipeline parallelism, the live requests are distributed over as many batches as there are
  stages.
- If `omni.scheduling` is "deadline", `policy.py` chooses the batch, refuses streams and sets each
  chunk's degradation level. Step costs are measured while serving (`cost_model.py`).

`streams.py` keeps each stream's state. This module identifies requests and sessions only by id.
"""

import math
import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.config import OmniConfig
from vllm_omni.core.sched.cost_model import StepCostModel
from vllm_omni.core.sched.policy import LiveRequest, choose_batch
from vllm_omni.core.sched.streams import RequestFields, ScheduledStreams
from vllm_omni.core.step_protocol import SchedulerNote, StepOutput, without_note
from vllm_omni.inputs import PARAMS_KEY
from vllm_omni.outputs import opaque
from vllm_omni.runtime.processes import end_with_parent

_PATIENCE_S = 0.5
"""Longest time in seconds for which requests without a deadline wait before one of them runs a
step.
"""

_NOT_NOW = 1 << 62
"""Value of `next_decode_eligible_step` that makes vLLM's scheduler leave a running request out of
the batch.
"""


class StreamBatchScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Called here because no other code of this package runs in the engine core's process if the
        # `mp` executor is used.
        end_with_parent()
        omni = OmniConfig.from_additional_config(self.vllm_config.additional_config)
        # One token is one micro-step, so vLLM's limit on tokens per step also limits the number of
        # requests per step.
        self._max_requests_per_step = min(omni.max_requests_per_step, self.max_num_scheduled_tokens)
        self._num_stages = self.parallel_config.pipeline_parallel_size
        self._streams = ScheduledStreams(
            _PATIENCE_S, 1 + len(omni.degradations), omni.chunks_in_flight
        )
        self._holds_back = omni.chunks_in_flight > 1
        self._delivering: set[str] = set()
        """Requests whose chunks have been denoised and whose results are still being decoded or
        copied.
        """
        self._without_params: set[str] = set()
        """Requests to vLLM's own `/pooling` route. They fail with an error, because this route
        sends no `DiffusionParams`.
        """
        self._by_deadline = omni.scheduling == "deadline"
        self._degradations = omni.degradations
        self._refuses_streams = omni.target_fps is not None
        self._cost_model = StepCostModel(1 + len(omni.degradations))
        self._in_flight: set[str] = set()
        self._chosen: set[str] = set()
        self._launched: dict[int, tuple[float, list[tuple[LiveRequest, bool]]]] = {}
        """Batches in flight, by the id of their `SchedulerOutput`. Each value holds the time at
        which the batch was formed, and one pair (request, whether this is its first step) per
        request.
        """
        self._last_end_s = 0.0
        self._unmeasured: tuple[float, float, float, list[float]] | None = None
        """Sizes of the last batch. The batch's device time arrives with the next result."""
        self._device_free_s = 0.0
        """Time at which the device is predicted to become idle."""

    def add_request(self, request: Request) -> None:
        now_s = time.monotonic()
        params = request.pooling_params
        extra = params.extra_kwargs if params is not None else None
        fields = RequestFields.read_extra_kwargs(request.request_id, extra)
        if params is not None:
            request.pooling_params = without_note(params)
        if self._refuses_streams:
            refused = self._streams.refusal(fields, now_s, self._cost_model.costs)
            if refused is not None:
                assert request.pooling_params is not None
                request.pooling_params = SchedulerNote(refused=refused).attach_to_params(
                    request.pooling_params
                )
                fields = RequestFields(request.request_id, math.inf, is_chunk=False)
        super().add_request(request)
        if PARAMS_KEY not in (extra or {}):
            self._without_params.add(request.request_id)
        self._streams.add_request(request.request_id, fields, now_s)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        steps = min(self._max_requests_per_step, math.ceil(len(self._streams) / self._num_stages))
        if not self._by_deadline:
            self.max_num_scheduled_tokens = max(1, steps + len(self._delivering))
            if self._holds_back:
                for request in self.running:
                    may_step = self._streams.may_step(request.request_id)
                    request.next_decode_eligible_step = 0 if may_step else _NOT_NOW
            output = super().schedule(throttle_prefills)
            for name in output.num_scheduled_tokens:
                self._streams.mark_stepped(name)
            return output
        now_s = time.monotonic()
        self._choose(now_s, max(1, steps))
        self.max_num_scheduled_tokens = max(1, len(self._chosen))
        output = super().schedule(throttle_prefills)
        batch = [
            live
            for name in output.num_scheduled_tokens
            if (live := self._streams.get(name)) is not None
        ]
        self._launched[id(output)] = now_s, [(live, not live.started) for live in batch]
        for live in batch:
            self._streams.mark_stepped(live.request_id)
        self._in_flight.update(output.num_scheduled_tokens)
        return output

    def _choose(self, now_s: float, max_requests: int) -> None:
        """Choose the next batch, and prepare vLLM's scheduler to schedule exactly the requests in
        this batch.
        """
        live = self._streams.runnable(self._in_flight)
        room = (
            self.max_num_active_reqs - len(self.running)
            if self.pause_state == PauseState.UNPAUSED
            else 0
        )
        if room < len(live):  # rare: the engine is paused, or vLLM's limit on requests is reached
            fresh = sorted(
                (r for r in live if not r.started), key=lambda r: (r.deadline_s, r.order)
            )[max(0, room) :]
            live = [request for request in live if request not in fresh]
        costs = self._cost_model.costs
        starts_s = max(now_s, self._device_free_s)
        batch = choose_batch(starts_s, live, costs, max_requests)
        self._chosen = {request.request_id for request in batch}
        self._chosen.update(self._delivering - self._in_flight)
        for request in self.running:
            request.next_decode_eligible_step = (
                0 if request.request_id in self._chosen else _NOT_NOW
            )
        starting = [self.requests[request.request_id] for request in batch if not request.started]
        if self._degradations:
            for waiting in starting:
                level = self._streams.decide_level(waiting.request_id, starts_s, live, costs)
                self._note_quality(waiting.request_id, level)
        if starting:
            self.waiting.remove_requests(starting)
            for waiting in reversed(starting):
                self.waiting.prepend_request(waiting)

    def _note_quality(self, request_id: str, level: int) -> None:
        request = self.requests[request_id]
        if level and request.pooling_params is not None:
            note = SchedulerNote(degradations=list(self._degradations[:level]))
            request.pooling_params = note.attach_to_params(request.pooling_params)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now_s = time.monotonic()
        step = model_runner_output if isinstance(model_runner_output, StepOutput) else None
        if step is not None:
            self._streams.order.lag_steps = step.lag_steps
            for request_id in step.committed:
                self._streams.committed(request_id)
        unreadable = self._without_params.intersection(scheduler_output.num_scheduled_tokens)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if unreadable:
            _hide_errors(unreadable, outputs)
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                request.num_computed_tokens -= num_tokens
                self._streams.advance(
                    request_id, step.progress.get(request_id) if step else None, now_s
                )
        if step is not None:
            for request_id in step.denoised:
                request = self.requests.get(request_id)
                if request is not None and not request.is_finished():
                    self._streams.finish_request(request_id, now_s)
                    self._delivering.add(request_id)
        if self._by_deadline:
            self._in_flight.difference_update(scheduler_output.num_scheduled_tokens)
            self._measure(scheduler_output, step, now_s)
        return outputs

    def _measure(
        self, scheduler_output: SchedulerOutput, step: StepOutput | None, now_s: float
    ) -> None:
        """Report a batch's duration to the cost model.

        If the previous batch's device time is known (`StepOutput.before_s`), that batch is
        reported. Otherwise, the current batch is reported with its duration on the host clock,
        unless the device is still running it. Batches run back to back on the device, so the
        duration is counted from the end of the previous batch.

        The host clock cannot be used if the host runs ahead of the device. A result then arrives
        when the previous step has ended, so the start of a chunk would seem to be free, and its end
        would seem to take an additional step.
        """
        formed_s, batch = self._launched.pop(id(scheduler_output), (now_s, []))
        going_on = step.progress if step is not None else self.requests
        total = sum(live.size for live, _ in batch)
        first = sum(live.size for live, starts in batch if starts)
        ending = [live for live, _ in batch if live.request_id not in going_on]
        levels = range(1 + len(self._degradations))
        last, *degraded = (
            sum(live.size for live in ending if live.level >= level) for level in levels
        )
        before, self._unmeasured = self._unmeasured, (total, first, last, degraded)
        if step is not None and step.before_s is not None:
            if before is not None:
                self._cost_model.observe(*before[:3], step.before_s, before[3])
        elif step is None or not step.unfinished:
            self._cost_model.observe(
                total, first, last, now_s - max(formed_s, self._last_end_s), degraded
            )
        self._last_end_s = self._device_free_s = now_s
        if step is not None and step.unfinished:
            costs = self._cost_model.costs
            own_s = (
                costs.step_s + costs.size_s * total + costs.first_s * first + costs.last_s * last
            )
            self._device_free_s += max(0.0, own_s)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether a waiting request may start.

        With the deadline policy, the request must be in the chosen batch. Without this policy, it
        must be the next request in its session. This method overrides a hook of vLLM's scheduler.
        """
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self._by_deadline:
            return request.request_id in self._chosen
        return self._streams.may_step(request.request_id)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._streams.finish_request(request.request_id, time.monotonic())
        self._delivering.discard(request.request_id)
        self._without_params.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks)


def _hide_errors(request_ids: set[str], outputs: dict[int, EngineCoreOutputs]) -> None:
    """Replace the errors of the given requests with data that `/pooling` cannot encode. `/pooling`
    then returns status 500; otherwise it would return the bytes of the error with status 200.
    """
    for engine_outputs in outputs.values():
        for output in engine_outputs.outputs:
            if output.request_id in request_ids and output.pooling_output is not None:
                output.pooling_output = opaque(output.pooling_output)
