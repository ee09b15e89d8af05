# SPDX-License-Identifier: Apache-2.0
"""`ARWorkerMixin`: additions to vLLM's worker that the CUDA and CPU workers share.

The mixin checks the engine arguments before the model is loaded, because vLLM's own models have no
config hook from this package. The mixin also provides statistics for `collective_rpc`.
"""

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig

from vllm_omni.engine_arguments.check import check_config
from vllm_omni.engine_arguments.refusals import (
    AR_WORKER_CLS,
    check_ar_scheduler,
    check_diffusion_worker,
)
from vllm_omni.engine_arguments.table import WorkerKind
from vllm_omni.model_executor.models.registry import ARCHITECTURES
from vllm_omni.runtime.processes import end_with_parent, engine_processes
from vllm_omni.worker.ar.runner import ARModelRunnerV1Mixin, ARModelRunnerV2Mixin

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object


def check_model(vllm_config: VllmConfig) -> None:
    """Check that this worker supports the model and that the scheduler sends hidden states.

    The worker makes this check, because vLLM's own config hooks take precedence over those of this
    package.

    Raises:
        ValueError: The model or the scheduler is not supported. The message is one line.
    """
    from vllm_omni.core.sched import ARHiddenStatesScheduler

    if vllm_config.model_config.architecture in ARCHITECTURES:
        check_diffusion_worker(AR_WORKER_CLS)
    chosen = vllm_config.scheduler_config
    check_ar_scheduler(
        chosen.scheduler_cls is not None
        and issubclass(chosen.get_scheduler_cls(), ARHiddenStatesScheduler)
    )


class ARWorkerMixin(_Worker):
    """Mixin for a vLLM worker class. List the mixin before the worker class."""

    model_runner: ARModelRunnerV1Mixin | ARModelRunnerV2Mixin

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_model(vllm_config)
        check_config(WorkerKind.AR, vllm_config)
        end_with_parent()
        super().__init__(vllm_config, *args, **kwargs)

    def engine_processes(self) -> dict[str, Any]:
        """Return the pids of this rank and of its engine core as JSON types, for
        `collective_rpc`.
        """
        return engine_processes()

    def hidden_states_stats(self) -> dict[str, Any]:
        """Return the available layers and the number of bytes that this rank has copied, as JSON
        types, for `collective_rpc`.
        """
        states = self.model_runner.hidden_state_collector
        return {
            "bytes_copied": states.bytes_copied,
            "layers": sorted(states.layers),
            "num_layers": states.num_layers,
            "delivers": states.copies,
            "runner": type(self.model_runner).__name__,
        }
