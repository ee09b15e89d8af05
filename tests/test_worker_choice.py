# SPDX-License-Identifier: Apache-2.0
"""With `--worker-cls`, a worker that does not fit the model is rejected at startup.

The one-line error names the worker that fits the model.
"""

import importlib
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_omni import worker
from vllm_omni.engine_arguments.refusals import AR_SCHEDULER_CLS, AR_WORKER_CLS, WORKER_CLS
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.serve import plan

STOCK = ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")
AR_PATHS = (
    AR_WORKER_CLS,
    "vllm_omni.worker.AR_gpu_worker.ARGPUWorker",
    "vllm_omni.worker.ar.gpu_worker.ARGPUWorker",
)
DIFFUSION_PATHS = (WORKER_CLS, "vllm_omni.worker.diffusion_gpu_worker.DiffusionGPUWorker")


def configure(model: Path, worker_cls: str, **arguments: str) -> VllmConfig:
    """Create the engine configuration as `vllm serve MODEL --worker-cls ...` does."""
    return EngineArgs(model=str(model), worker_cls=worker_cls, **arguments).create_engine_config()  # type: ignore[arg-type]


@pytest.mark.parametrize("worker_cls", [*AR_PATHS, *STOCK])
def test_a_world_refuses_workers_of_language_models(null_world: Path, worker_cls: str) -> None:
    """A language model worker is rejected for a world model before any process starts, rather than
    at the first request.
    """
    reason = (
        f"--worker-cls {worker_cls} runs language models; this checkpoint needs "
        f"{WORKER_CLS}: "
        "drop the flag"
    )
    with pytest.raises(ValueError, match=reason):
        configure(null_world, worker_cls)
    with pytest.raises(CommandError, match=f"^{reason}$"):
        plan([str(null_world), "--worker-cls", worker_cls], {}, [])


@pytest.mark.parametrize("worker_cls", DIFFUSION_PATHS)
def test_a_language_model_refuses_workers_of_diffusion_models(
    tiny_language_model: Path, worker_cls: str
) -> None:
    with pytest.raises(
        ValueError,
        match=f"--worker-cls {worker_cls} runs diffusion models; for a language model drop",
    ):
        configure(tiny_language_model, worker_cls)


@pytest.mark.parametrize("worker_cls", [*DIFFUSION_PATHS, "my.Worker"])
def test_a_world_takes_its_worker_and_a_users_own(null_world: Path, worker_cls: str) -> None:
    """A world model accepts this package's worker under each of the worker's import paths, and the
    config hook sets the other arguments.

    A user's own worker class is not checked.
    """
    config = configure(null_world, worker_cls)
    assert config.parallel_config.worker_cls == worker_cls
    assert config.model_config.skip_tokenizer_init


@pytest.mark.parametrize("worker_cls", AR_PATHS)
def test_the_worker_of_language_models_brings_its_scheduler(
    tiny_language_model: Path, worker_cls: str
) -> None:
    """The language model worker selects this package's scheduler. Without this scheduler, requests
    for hidden states would get only text.

    With any other worker, the engine uses vLLM's scheduler.
    """
    assert (
        configure(tiny_language_model, worker_cls).scheduler_config.scheduler_cls
        == AR_SCHEDULER_CLS
    )
    assert configure(tiny_language_model, "auto").scheduler_config.scheduler_cls is None


def test_the_worker_of_every_checkpoint_is_accepted_for_a_pipeline_without_worker(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The same command can serve every checkpoint that this package writes, because `--worker-cls`
    is accepted even for a pipeline that runs without a worker.
    """
    from vllm_omni.entrypoints.cli.checkpoints.make_tiny import write_tiny

    folder = tmp_path_factory.mktemp("pipeline") / "flux"
    write_tiny("diffusers_pipeline", folder, layout="flux")
    backend = configure(folder, WORKER_CLS).parallel_config.distributed_executor_backend
    assert str(backend).endswith("DiffusersPipelineExecutor")


@pytest.mark.parametrize(
    ("module", "name"),
    [("diffusion_gpu_worker", "DiffusionGPUWorker"), ("AR_gpu_worker", "ARGPUWorker")],
)
def test_the_module_paths_of_other_integrations_hold_the_same_workers(
    module: str, name: str
) -> None:
    found = importlib.import_module(f"vllm_omni.worker.{module}")
    assert getattr(found, name) is getattr(worker, name)
    with pytest.raises(AttributeError, match="Nothing"):
        found.Nothing  # noqa: B018


def test_the_module_paths_of_other_integrations_hold_the_same_runners() -> None:
    from vllm_omni.worker.ar.runner import ARModelRunnerV1Mixin
    from vllm_omni.worker.AR_gpu_model_runner import ARGPUModelRunner
    from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner
    from vllm_omni.worker.diffusion_model_runner import DiffusionGPUModelRunner as ByPath

    assert ByPath is DiffusionGPUModelRunner
    assert issubclass(ARGPUModelRunner, ARModelRunnerV1Mixin)
