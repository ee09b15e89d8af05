# SPDX-License-Identifier: Apache-2.0
"""Builds an autoregressive engine's `SchedulerOutput`s by hand, for runner tests."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


def new_request(
    name: str,
    hidden_states: str | None,
    extra_args: Mapping[str, Any] | None = None,
    prompt_len: int = 3,
    layers: Iterable[int] = (-1,),
) -> NewRequestData:
    """Return a newly scheduled request.

    Args:
        hidden_states: Mode of the requested hidden states. With None, no hidden states are
            requested.
        extra_args: Replacement for the sampling parameters' `extra_args`. Default: built from
            `hidden_states`.
    """
    if extra_args is None and hidden_states is not None:
        extra_args = {"omni": {"hidden_states": hidden_states, "layers": list(layers)}}
    return NewRequestData(
        req_id=name,
        prompt_token_ids=list(range(prompt_len)),
        mm_features=[],
        sampling_params=SamplingParams(extra_args=None if extra_args is None else dict(extra_args)),
        pooling_params=None,
        block_ids=([0],),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=list(range(prompt_len)),
    )


def scheduler_output(
    new: Iterable[NewRequestData] = (),
    scheduled: Mapping[str, int] | None = None,
    finished: Iterable[str] = (),
    drafts: Mapping[str, list[int]] | None = None,
) -> SchedulerOutput:
    """Return the scheduler output for one engine step.

    Args:
        scheduled: Number of scheduled tokens per request. Default for a new request: its whole
            prompt.
    """
    new = list(new)
    tokens = {**{data.req_id: data.prompt_len for data in new}, **(scheduled or {})}
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens=dict(drafts or {}),
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
    )
