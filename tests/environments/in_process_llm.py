# SPDX-License-Identifier: Apache-2.0
"""A replacement for vLLM's `LLM` that runs requests on a LingBot World model in this process."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams, request_tensors
from vllm_omni.model_executor.interfaces import DiffusionRequest, SessionState
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld, WorldSetup
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed, pack, pack_error


class InProcessLLM:
    """Provides the parts of vLLM's `LLM` that environments use: `encode` and
    `llm_engine.vllm_config`.

    Attributes:
        sessions: Live sessions by id.
        refused_forks: For each of the next forks, whether it is refused.
    """

    def __init__(self, checkpoint: Path, omni: dict[str, Any]) -> None:
        hf_config = get_family("lingbot_world").hf_config(checkpoint) | {
            "omni_family": "lingbot_world"
        }
        layout, options = find_layout(checkpoint), OmniConfig.from_additional_config({"omni": omni})
        setup = WorldSetup.of_checkpoint(
            hf_config["lingbot_world"], layout, options, torch.float32, ParallelContext()
        )
        self.model = LingBotWorld(setup)
        self.model.load_checkpoint(layout)
        self.sessions: dict[str, SessionState] = {}
        self.refused_forks: Iterator[bool] = iter(())
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: hf_config)),
                parallel_config=SimpleNamespace(local_engines_only=False, data_parallel_size=1),
                additional_config={"omni": omni},
            )
        )

    @property
    def client(self) -> "InProcessClient":
        """Return an engine client that runs requests on the same model."""
        return InProcessClient(self)

    def encode(self, prompts: Sequence[Any], pooling: Sequence[Any], **options: Any) -> list[Any]:
        assert len(prompts) == len(pooling) and options == {
            "pooling_task": "plugin",
            "use_tqdm": False,
        }
        return [
            SimpleNamespace(outputs=SimpleNamespace(data=self._response(each.extra_kwargs)))
            for each in pooling
        ]

    def _response(self, extra_kwargs: dict[str, Any]) -> torch.Tensor:
        try:
            params = DiffusionParams.from_extra_kwargs(extra_kwargs)
            return pack(*self._run(params, request_tensors(extra_kwargs)))
        except RequestFailed as failure:
            return pack_error(failure.code, failure.message)

    def _run(
        self, params: DiffusionParams, tensors: dict[str, torch.Tensor]
    ) -> tuple[dict[str, Any], Any]:
        if params.op == "close":
            self.sessions.pop(params.session_id, None)
            return {}, {}
        if params.op == "fork":
            assert params.fork_to is not None
            if next(self.refused_forks, False):
                raise RequestFailed("capacity", "no room for a copy")
            self.sessions[params.fork_to] = self.sessions[params.session_id].fork(params.fork_to)
            return {}, {}
        if params.chunk_index == 0:
            self.sessions[params.session_id] = self.model.new_session(params)
        if params.session_id not in self.sessions:
            raise RequestFailed("unknown_session", "no such session")
        request = DiffusionRequest("r", params, tensors, self.sessions[params.session_id])
        self.model.prepare_encode(request)
        if params.trajectory:
            self.model.record_trajectory(request)
        while request.step < request.num_steps:
            self.model.step_scheduler([request], self.model.denoise_step([request]))
            request.step += 1
        result = self.model.post_decode(request)
        self.model.commit(request)
        return result


class InProcessClient:
    """Provides the methods of vLLM's engine client that endpoints use: `encode` and `abort`."""

    errored = False

    def __init__(self, llm: InProcessLLM) -> None:
        self._llm = llm

    async def encode(self, prompt: Any, pooling: Any, request_id: str) -> AsyncIterator[Any]:
        data = await asyncio.to_thread(self._llm._response, pooling.extra_kwargs)
        yield SimpleNamespace(outputs=SimpleNamespace(data=data), finished=True)

    async def abort(self, request_id: str) -> None:
        """Do nothing, because a chunk always runs to completion."""
