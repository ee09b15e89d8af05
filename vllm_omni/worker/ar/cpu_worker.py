# SPDX-License-Identifier: Apache-2.0
"""AR worker for CPUs. Import this module only if vLLM's platform is CPU (see
`vllm_omni.worker`).
"""

from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.compat import share_memory_nodes
from vllm_omni.worker.ar.runner import ARModelRunnerV1Mixin, ARModelRunnerV2Mixin
from vllm_omni.worker.ar.worker import ARWorkerMixin


class ARCPUModelRunner(ARModelRunnerV1Mixin, CPUModelRunner):
    """vLLM's V1 runner for CPUs, extended to return hidden states."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        """Sample without the random generators of requests whose prompts have not been fully
        computed.

        A step that computes only part of a prompt also samples a token, which is discarded. vLLM
        then rewinds the request's generator by an offset. CPU generators do not support this, and
        the resulting exception would stop the engine. A generator that is not passed to the sampler
        does not advance, so nothing has to be rewound, and a seed produces the same tokens
        regardless of how a prompt is split (docs/architecture/seams.md).
        """
        batch = self.input_batch
        unfinished = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs]).tolist()
        aside = {
            index: batch.generators.pop(index) for index in unfinished if index in batch.generators
        }
        try:
            return super().sample_tokens(grammar_output)
        finally:
            batch.generators.update(aside)


class ARCPUWorker(ARWorkerMixin, CPUWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        share_memory_nodes(vllm_config.parallel_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = self._make_model_runner()  # because CPUWorker hard-codes its runner

    def _make_model_runner(self) -> Any:
        assert self.device is not None
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2

            class ARCPUModelRunnerV2(ARModelRunnerV2Mixin, CPUModelRunnerV2):
                pass

            return ARCPUModelRunnerV2(self.vllm_config, self.device)
        return ARCPUModelRunner(self.vllm_config, self.device)
