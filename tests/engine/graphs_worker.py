# SPDX-License-Identifier: Apache-2.0
"""A worker for `--worker-cls` that captures and replays forward passes even without CUDA."""

from typing import Any

from helpers.host_capture import hold

from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs
from vllm_omni.worker import SharedGPUWorker


class GraphsWorker(SharedGPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._transformer: Any = self.model_runner.network.transformer
        self._transformer.graphs = ForwardGraphs(capture=hold)
        self.model_runner.model.warms_up_twice = True

    def graph_counts(self) -> list[int]:
        """Return the number of captured graphs and the number of pooled ring buffers. Tests call
        this method through `collective_rpc`.
        """
        return [len(self._transformer.graphs), len(self._transformer.graphs.pool)]
