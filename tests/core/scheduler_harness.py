# SPDX-License-Identifier: Apache-2.0
"""A real `StreamBatchScheduler` with a mocked worker."""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_omni.core.sched import StreamBatchScheduler
from vllm_omni.core.step_protocol import ChunkProgress, StepOutput
from vllm_omni.inputs import DiffusionParams


@functools.cache
def _engine_config(model: Path) -> VllmConfig:
    return EngineArgs(
        model=str(model), config_format="omni", skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()


class Harness:
    """A scheduler and a mocked worker. `max_tokens` is vLLM's limit on tokens per step; 0 keeps
    vLLM's default.
    """

    def __init__(
        self,
        model: Path,
        stages: int = 1,
        max_requests_per_step: int = 4,
        max_tokens: int = 0,
        **omni: Any,
    ) -> None:
        config = copy.deepcopy(_engine_config(model))
        config.additional_config = {
            "omni": {"max_requests_per_step": max_requests_per_step, **omni}
        }
        config.parallel_config.pipeline_parallel_size = stages
        config.scheduler_config.enable_chunked_prefill = False
        config.cache_config.num_gpu_blocks = 1
        if max_tokens:
            config.scheduler_config.max_num_scheduled_tokens = max_tokens
        self.last: SchedulerOutput | None = None
        self.scheduler = StreamBatchScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
        )

    def add(self, name: str, session: str, chunk: int | None = None, **fields: Any) -> None:
        extra = fields.pop("extra", {})
        params = DiffusionParams(
            session_id=session, chunk_index=chunk, **fields
        ).to_pooling_params()
        params.extra_kwargs = {**(params.extra_kwargs or {}), **extra}
        self.scheduler.add_request(
            Request(
                request_id=name, prompt_token_ids=[0], sampling_params=None, pooling_params=params
            )
        )

    def schedule(self) -> tuple[list[str], SchedulerOutput]:
        self.last = output = self.scheduler.schedule()
        return list(output.num_scheduled_tokens), output

    def response(
        self,
        output: SchedulerOutput,
        done: Any = (),
        denoised: Any = (),
        progress: dict[str, Any] | None = None,
        committed: Any = (),
        **more: Any,
    ) -> None:
        """Apply the worker's output for one step. Only requests in `done` receive a result. `more`
        contains additional fields of `StepOutput`.
        """
        reported = {name: ChunkProgress(*values) for name, values in (progress or {}).items()}
        response = StepOutput(
            **_results(output, done),
            denoised=tuple(denoised),
            committed=tuple(committed),
            progress=reported,
            **more,
        )
        self.scheduler.update_from_output(output, response)

    def stock_response(
        self, output: SchedulerOutput, done: Any = ()
    ) -> dict[int, EngineCoreOutputs]:
        """Apply the worker's output for one step as a stock `ModelRunnerOutput`."""
        return self.scheduler.update_from_output(
            output, ModelRunnerOutput(**_results(output, done))
        )

    def step(self, done: Any = (), denoised: Any = ()) -> list[str]:
        names, output = self.schedule()
        self.response(output, done, denoised)
        return names


def _results(output: SchedulerOutput, done: Any) -> dict[str, Any]:
    names = list(output.num_scheduled_tokens)
    return {
        "req_ids": names,
        "req_id_to_index": {name: index for index, name in enumerate(names)},
        "pooler_output": [
            torch.zeros(1, dtype=torch.uint8) if name in done else None for name in names
        ],
    }
