# SPDX-License-Identifier: Apache-2.0
"""`PipelineRunner`: runs scheduled requests, with one denoise step per request in each engine step.

The runner combines the request states (`RequestStates`), the pipeline (`PipelineHost`), and one
worker thread (`WorkerThread`) for each request that may run concurrently. `omni.model.interleave`
is the maximum number of concurrent requests (default: one); all other requests wait in the
scheduler's order.

In its first engine step, a request runs its encoding and its first denoise step. In each subsequent
engine step, it runs one more denoise step. In its last engine step, it runs the decode. The worker
thread is paused between engine steps, so an abort takes effect before the next step.

Invariants (tests/executor/):
- A request's result is bit-identical to the result of a direct pipeline call, regardless of other
  requests.
- A request that fails or is aborted does not affect other requests. A device error stops the
  engine.
- A finished, failed or aborted request leaves no memory allocated on the device.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_omni.executor.adapters import Selection
from vllm_omni.executor.call_arguments import PipelineCall, PipelineInfo, pipeline_call
from vllm_omni.executor.call_results import latents_tensor, result_tensors
from vllm_omni.executor.pipeline_host import PipelineHost
from vllm_omni.executor.transformer_cache import cached_steps
from vllm_omni.executor.worker_thread import PausePoint, WorkerThread
from vllm_omni.model_executor.requests import RequestState, RequestStates
from vllm_omni.model_executor.results import FiniteCheck
from vllm_omni.outputs import RequestFailed, pack, pack_error

logger = logging.getLogger("vllm." + __name__)

Result = tuple[dict[str, Any], dict[str, torch.Tensor]]

_MAX_QUOTED = 300
_PRIVATE = re.compile(r"0x[0-9a-fA-F]+|(^|\s|['\"(])/\w|tensor\(|\bat \w+:\d+")


@dataclass(eq=False)
class RunningCall:
    """A running request."""

    call: PipelineCall
    """The validated request, converted to a pipeline call."""
    lora: Selection
    """The request's LoRA adapters."""
    thread: WorkerThread[Result]
    """Worker thread that runs the request."""
    step: int = 0
    """Number of denoise steps that the request has finished."""
    num_steps: int = 0
    """Total number of denoise steps: initially the requested number, and later the number that the
    pipeline reports."""
    step_ms: list[float] = field(default_factory=list)
    """Durations in milliseconds of the engine steps in which the request has run."""


class PipelineRunner:
    """Runs one pipeline's requests. All methods must be called from the same thread.

    Args:
        host: Loads and calls the pipeline.
        step_at_a_time: Whether an engine step runs one denoise step. If false, each engine step
            runs a whole request.
        on_thread_start: Function that every worker thread calls before anything else.
    """

    def __init__(
        self,
        host: PipelineHost,
        *,
        step_at_a_time: bool,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self.info = PipelineInfo.of_pipeline(host.pipeline)
        self.requests = RequestStates()
        self.step_at_a_time = step_at_a_time
        self._running: dict[str, RunningCall] = {}
        self._on_thread_start = on_thread_start
        self._threads: list[WorkerThread[Result]] = [
            WorkerThread(f"pipeline-{number}", self._start_thread)
            for number in range(host.options.interleave)
        ]
        self.on_step: Callable[[], None] = lambda: None
        """Function that is called on the worker thread after each denoise step, for example by a
        profiler that counts steps.
        """

    def _start_thread(self) -> None:
        self._on_thread_start()
        if self.host.device.type == "cuda":
            torch.cuda.set_device(self.host.device)

    # -- the engine step ---------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step of each scheduled request that has a worker thread or can be assigned
        one.
        """
        for request_id in scheduler_output.finished_req_ids:
            self._drop(request_id)
        for data in scheduler_output.scheduled_new_reqs:
            self.requests.add_request(data)
        scheduled = list(scheduler_output.num_scheduled_tokens)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        outputs = [self._step(self.requests[request_id]) for request_id in scheduled]
        return ModelRunnerOutput(
            req_ids=scheduled,
            req_id_to_index={request_id: index for index, request_id in enumerate(scheduled)},
            pooler_output=outputs,
        )

    def _step(self, state: RequestState) -> torch.Tensor | None:
        """Run a request until its current step ends.

        Returns:
            The result envelope or error envelope if the request has finished or failed, otherwise
            None.
        """
        try:
            if state.failure is not None:
                raise state.failure
            if state.is_session_operation:
                return pack(_session_operation(state))
            if state.request_id not in self._running and not self._admit(state):
                return None
            running = self._running[state.request_id]
            while True:
                envelope = self._advance(state, running)
                if envelope is not None or self.step_at_a_time:
                    return envelope
        except Exception as error:
            running_call = self._running.get(state.request_id)
            failure = _as_failure(error, started=running_call is not None and running_call.step > 0)
            if running_call is not None:
                self._release(state.request_id)
                self.host.after_abandoned_call()
                if self.host.device.type == "cuda":
                    torch.cuda.empty_cache()
            state.failure = failure
            return pack_error(failure.code, failure.message)

    def _admit(self, state: RequestState) -> bool:
        """Validate a request and assign it to a worker thread. Return False if none is free."""
        thread = next((thread for thread in self._threads if not thread.busy), None)
        if thread is None:
            return False
        if self.host.asleep:
            raise RequestFailed("capacity", "the pipeline is asleep; wake it up first")
        assert state.params is not None
        call = pipeline_call(
            state.params, state.tensors, self.info, self.host.options, self.host.device
        )
        running = RunningCall(
            call, self.host.adapters.select(call.lora), thread, num_steps=call.num_steps
        )
        thread.start_work(lambda pause: self._run(running, pause))
        self._running[state.request_id] = running
        return True

    def _advance(self, state: RequestState, running: RunningCall) -> torch.Tensor | None:
        self.host.adapters.activate(self.host.pipeline, running.lora)
        started_s = time.perf_counter()
        finished, result = running.thread.advance()
        running.step_ms.append(round((time.perf_counter() - started_s) * 1e3, 3))
        if not finished:
            return None
        del self._running[state.request_id]
        assert result is not None and state.params is not None
        meta, tensors = result
        meta = {
            "session_id": state.params.session_id,
            "chunk_index": 0,
            **running.call.meta,
            **meta,
            "seed": running.call.seed,
            "num_steps": running.step,
        }
        if running.lora:
            meta["lora"] = dict(running.lora)
        first, *later = running.step_ms
        total_ms = round((time.perf_counter() - state.started_s) * 1e3, 3)
        # The pipeline does not separate encoding from the first step. If there is no step callback,
        # the whole call is timed as `encode_and_first_step`.
        stages = {"encode_and_first_step": [first], "steps": later[:-1], "decode": later[-1:]}
        return pack({**meta, "timings_ms": {**stages, "total": [total_ms]}}, tensors)

    def _run(self, running: RunningCall, pause: PausePoint) -> Result:
        """Run the whole pipeline call. This method runs on the worker thread."""
        call, video = running.call, self.info.video
        pipeline = self.host.call_object()
        arguments = dict(call.arguments)
        if "generator" in self.info.parameters:
            arguments["generator"] = self.host.generators(call.seed, call.num_images)
        pace = _StepTimes(self.host.device)

        def on_step_end(
            pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]
        ) -> dict[str, Any]:
            running.step = index + 1
            running.num_steps = max(int(pipe.num_timesteps), running.step)
            if running.step == running.num_steps and isinstance(
                tensors.get("latents"), torch.Tensor
            ):
                FiniteCheck(tensors["latents"]).require("the request's latents")
            pace.step_launched()
            self.on_step()
            pause()
            return {}

        if "callback_on_step_end" in self.info.parameters:
            arguments["callback_on_step_end"] = on_step_end
        meta: dict[str, Any] = {}
        with cached_steps(pipeline, call.first_block_cache) as counted:
            output = pipeline(**arguments)
            meta |= counted()
        if arguments["output_type"] == "latent":
            return meta, {"latents": latents_tensor(output)}
        tensors = result_tensors(output, video=video)
        if video:
            meta["fps"] = call.fps
        if self.host.device.type == "cuda":
            torch.cuda.synchronize(self.host.device)
        return meta, tensors

    # -- ends --------------------------------------------------------------------------------------

    def _drop(self, request_id: str) -> None:
        """Release a request that the scheduler has finished or aborted. Idempotent."""
        self.requests.pop(request_id, None)
        if request_id in self._running:
            self._release(request_id)
            self.host.after_abandoned_call()

    def _release(self, request_id: str) -> None:
        running = self._running.pop(request_id)
        try:
            running.thread.cancel()
        except Exception:  # boundary: a pipeline's cleanup code may fail
            logger.exception("the pipeline failed while its call was cancelled")

    def cancel_all(self, failure: RequestFailed) -> None:
        """Cancel every call. Requests that the scheduler is still running fail with `failure`."""
        for request_id in list(self._running):
            self._release(request_id)
            state = self.requests.get(request_id)
            if state is not None:
                state.failure = failure
        self.host.after_abandoned_call()

    def close(self) -> None:
        for thread in self._threads:
            thread.close()

    def request_progress(self) -> dict[str, list[int]]:
        """Return `{session id: [steps done, steps in total]}` for all unfinished requests."""
        progress = {}
        for state in self.requests.values():
            if (
                state.params is not None
                and state.failure is None
                and not state.is_session_operation
            ):
                running = self._running.get(state.request_id)
                wanted = state.params.num_inference_steps or 0
                progress[state.params.session_id] = (
                    [running.step, running.num_steps] if running else [0, wanted]
                )
        return progress

    def on_worker_thread(self, function: Callable[[], None]) -> None:
        """Run a function on the first worker thread. Without interleaving, this is the only worker
        thread.
        """
        self._threads[0].call(function)


class _StepTimes:
    """Keeps the host at most one step ahead of the device, so aborts take effect within one
    step.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._previous: torch.cuda.Event | None = None

    def step_launched(self) -> None:
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            if self._previous is not None:
                self._previous.synchronize()
            self._previous = event


def _session_operation(state: RequestState) -> dict[str, Any]:
    assert state.params is not None
    if state.params.op == "fork":
        raise RequestFailed(
            "invalid_request", "a diffusers pipeline has no sessions, so nothing can be forked"
        )
    return {"op": state.params.op, "session_id": state.params.session_id, "existed": False}


def _as_failure(error: Exception, *, started: bool) -> RequestFailed:
    """Convert an exception to an error for the client.

    Errors after which the device is unusable are re-raised and stop the engine. A ValueError or
    TypeError before the first step means that the pipeline rejected its arguments. The client
    receives the text of such an exception if it is short and contains no path, address or tensor.
    """
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return RequestFailed("oom", "the device ran out of memory on this request")
    if isinstance(error, torch.AcceleratorError):
        raise error
    logger.exception("a request failed", exc_info=error)
    if isinstance(error, ValueError | TypeError) and not started:
        text = " ".join(str(error).split())
        quoted = f": {text}" if 0 < len(text) <= _MAX_QUOTED and not _PRIVATE.search(text) else ""
        return RequestFailed("invalid_request", f"the pipeline refused the request{quoted}")
    return RequestFailed(
        "engine_error", "the pipeline failed on this request; the server's log has the details"
    )
