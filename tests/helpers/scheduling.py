# SPDX-License-Identifier: Apache-2.0
"""Builds `SchedulerOutput`s by hand, for runner tests."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed, unpack


def new_request(
    request_id: str, tensors: Mapping[str, torch.Tensor] | None = None, **fields: Any
) -> NewRequestData:
    """Return a newly scheduled request. `fields` are fields of `DiffusionParams`."""
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=[0],
        mm_features=[],
        sampling_params=None,
        pooling_params=DiffusionParams(**fields).to_pooling_params(tensors),
        block_ids=(),
        num_computed_tokens=0,
        lora_request=None,
    )


def step(
    new: Iterable[NewRequestData] = (), running: Iterable[str] = (), finished: Iterable[str] = ()
) -> SchedulerOutput:
    """Return a scheduler output for one engine step.

    Args:
        new: Requests scheduled for the first time.
        running: Requests scheduled again.
        finished: Requests that have finished or were aborted.
    """
    new = list(new)
    scheduled = {**dict.fromkeys(running, 1), **{data.req_id: 1 for data in new}}
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=len(scheduled),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
    )


def execute(runner: Any, scheduler_output: SchedulerOutput) -> dict[str, Any]:
    """Run one engine step.

    Returns:
        The result of each request, by request id: `(meta, tensors)`, a `RequestFailed`, or None if
        the request has not finished.
    """
    with torch.inference_mode():
        output = runner.execute_model(scheduler_output)
    results: dict[str, Any] = {}
    for request_id, envelope in zip(output.req_ids, output.pooler_output or [], strict=True):
        if envelope is None:
            results[request_id] = None
            continue
        try:
            results[request_id] = unpack(envelope)
        except RequestFailed as failure:
            results[request_id] = failure
    return results


def run_to_end(runner: Any, *new: NewRequestData) -> dict[str, Any]:
    """Run requests together until each has a result, then report them to the runner as finished."""
    results: dict[str, Any] = {}
    running = [data.req_id for data in new]
    pending = execute(runner, step(new=new))
    for _ in range(100):
        results.update({name: value for name, value in pending.items() if value is not None})
        running = [name for name in running if name not in results]
        if not running:
            execute(runner, step(finished=[data.req_id for data in new]))
            return results
        pending = execute(runner, step(running=running))
    raise AssertionError(f"requests {running} did not finish in 100 steps")
