# SPDX-License-Identifier: Apache-2.0
"""`DiffusersPipelineExecutor`: vLLM's executor interface for a diffusers pipeline.

    vllm serve DIR --distributed-executor-backend vllm_omni.executor.DiffusersPipelineExecutor
    --config-format omni

The pipeline runs in the engine's process on one device, without vLLM's workers, model runner or K/V
cache. `PipelineWorker` handles vLLM's `collective_rpc` calls to workers. If a call needs a feature
that pipelines do not support, it fails with an error that names the feature.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.profiler.wrapper import create_worker_profiler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni.compat import set_profiler_kwargs
from vllm_omni.config import OmniConfig
from vllm_omni.executor.cpu_threads import CpuThreads
from vllm_omni.executor.pipeline_host import PipelineHost
from vllm_omni.executor.pipeline_runner import PipelineRunner
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions, LoraSource
from vllm_omni.outputs import RequestFailed
from vllm_omni.registration import steps_one_at_a_time
from vllm_omni.runtime.processes import end_with_parent, engine_processes

logger = logging.getLogger("vllm." + __name__)


class DiffusersPipelineExecutor(Executor):
    supports_pp = False

    def _init_executor(self) -> None:
        if self.parallel_config.world_size != 1:
            raise ValueError(
                "DiffusersPipelineExecutor runs one process on one device: tensor, pipeline and "
                "context parallel sizes "
                f"must be 1, their product is {self.parallel_config.world_size}"
            )
        self.worker = PipelineWorker(self.vllm_config)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a method of the single worker immediately. `timeout` is ignored.

        Returns:
            A list with one result, or a future of this list if `non_block` is set.
        """
        if not non_block:
            return [run_method(self.worker, method, args, kwargs or {})]
        future: Future[list[Any]] = Future()
        try:
            future.set_result([run_method(self.worker, method, args, kwargs or {})])
        except Exception as error:
            future.set_exception(error)
        return future

    def execute_model(  # type: ignore[override]
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        output = self.worker.runner.execute_model(scheduler_output)
        return _done(output) if non_block else output

    def sample_tokens(  # type: ignore[override]
        self, grammar_output: Any, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Return an empty output, because pooling requests get their output from
        `execute_model`.
        """
        return _done(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT

    def profile(
        self, is_start: bool = True, profile_prefix: str | None = None, **options: Any
    ) -> None:
        self.worker.profile(is_start, profile_prefix, **options)

    def check_health(self) -> None:
        """Check that the executor has not been shut down.

        Nothing else is checked, because the pipeline runs in the calling process.

        Raises:
            RuntimeError: The executor has been shut down.
        """
        self.worker.check_health()

    def shutdown(self) -> None:
        """Stop all running calls at their next step and free the pipeline. Idempotent."""
        self.worker.shutdown()

    def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        raise NotImplementedError(
            "a diffusers pipeline is saved with diffusers' own save_pretrained"
        )


def _done(output: ModelRunnerOutput) -> Future[ModelRunnerOutput]:
    future: Future[ModelRunnerOutput] = Future()
    future.set_result(output)
    return future


class PipelineWorker:
    """Methods that `collective_rpc` can call. Methods that clients can call return JSON types."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        end_with_parent()
        self.vllm_config = vllm_config
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        self.device = _device(vllm_config)
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype), (
            "vLLM resolves dtype names before it creates an executor"
        )
        self._cpu_threads = CpuThreads(self.device)
        host = PipelineHost(
            Path(vllm_config.model_config.model),
            DiffusersOptions.parse(omni.model),
            self.device,
            dtype,
            random_weights=vllm_config.load_config.load_format == "dummy",
        )
        self.runner = PipelineRunner(
            host,
            step_at_a_time=steps_one_at_a_time(vllm_config),
            on_thread_start=self._cpu_threads.set_threads,
        )
        self._profiler: Any = None
        self._shut_down = False

    # -- requests ----------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute_model(scheduler_output)

    def request_progress(self) -> dict[str, list[int]]:
        """Return `{session id: [steps done, steps in total]}` for each unfinished request."""
        return self.runner.request_progress()

    def session_stats(self) -> dict[str, Any]:
        """Return the same statistics fields as a diffusion worker does (`SessionStore.stats`).

        All counts are 0, because a pipeline has no sessions.
        """
        names = ("sessions", "max_sessions", "bytes", "suspended", "suspended_bytes")
        counts = dict.fromkeys((*names, "on_disk", "disk_bytes"), 0)
        return {**counts, "can_suspend": False, "max_bytes": None, "chunks": {}}

    def fast_paths(self) -> list[dict[str, Any]]:
        """Return an empty list, because diffusers chooses its own implementations."""
        return []

    def engine_processes(self) -> dict[str, Any]:
        return engine_processes()

    def close_session(self, session_id: str) -> bool:
        return False

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("plugin",)

    # -- start -------------------------------------------------------------------------------------

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return the names of vLLM's K/V cache layouts. A pipeline has no K/V cache, but the engine
        requires at least one layout name.
        """
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

        return [layout.name for layout in get_supported_kv_cache_layouts([])]

    def set_kv_cache_layout(
        self, kv_cache_layout: str, cp_kv_cache_interleave_size: int = 1
    ) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """No-op version of the worker methods that a pipeline does not need. For example,
        `execute_dummy_batch` is not needed, because data-parallel engines run independently of each
        other.
        """

    initialize_from_config = update_max_model_len = execute_dummy_batch = _nothing
    get_kv_connector_handshake_metadata = get_simple_cpu_offload_num_cpu_blocks = (
        take_draft_token_ids
    ) = _nothing
    reset_mm_cache = reset_encoder_cache = _nothing

    def determine_available_memory(self) -> int:
        return 0

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Do nothing, because nothing is compiled and inputs vary too much for a warm-up."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def supports_draft_weight_updates(self) -> bool:
        return False

    # -- device ------------------------------------------------------------------------------------

    def synchronize_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def device_memory(self) -> dict[str, int]:
        """Return the device's used and total memory and torch's peak memory since startup, in
        bytes. On a CPU, the result is empty.
        """
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "used": total - free,
            "total": total,
            "torch_peak": torch.cuda.max_memory_allocated(self.device),
        }

    def sleep(self, level: int = 1) -> dict[str, int]:
        """Free device memory.

        Level 1 moves the weights to host memory (on a CPU, it frees nothing). Level 2 discards the
        weights until `wake_up` is called. After level 1, a request in progress continues. After
        level 2, a request in progress fails unless vLLM has already aborted it.
        """
        if level == 2:
            self.runner.cancel_all(
                RequestFailed("capacity", "the engine was put to sleep during this request")
            )
        freed = self.runner.host.sleep(level)
        logger.info(
            "sleep level %d freed %.2f GiB on %s", level, freed["freed"] / 2**30, self.device
        )
        return freed

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            self.runner.host.wake_up()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Refuse to discard weights and ignore all other tags. vLLM itself discards only
        `kv_cache`, which a pipeline does not have.
        """
        if "weights" in tags:
            raise NotImplementedError("discarding weights: use sleep level 2")

    def reload_weights(self, weights_path: str | None = None, **kwargs: Any) -> None:
        """Reload the weights from the current directory, or from another directory that contains a
        pipeline of the same class.

        Requests in progress fail.

        Args:
            weights_path: Pipeline directory, or None for the current directory.
            **kwargs: Other vLLM arguments. `weights_iterator` is not supported.

        Raises:
            ValueError: The arguments are not supported.
        """
        if kwargs.get("weights_iterator") is not None:
            raise ValueError(
                "reload_weights accepts a pipeline directory (weights_path) or nothing, not an "
                "iterator"
            )
        self.runner.cancel_all(
            RequestFailed("capacity", "the weights were reloaded during this request")
        )
        self.runner.host.reload(None if weights_path is None else Path(weights_path))

    # -- adapters ----------------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter for vLLM's own `add_lora` call. Requests can then select the adapter by
        its name in `options.lora`.
        """
        host, source = self.runner.host, LoraSource(path=lora_request.lora_path)
        return host.adapters.add_adapter(
            host.pipeline, lora_request.lora_name, source, lora_request.lora_int_id
        )

    def remove_lora(self, lora_id: int) -> bool:
        host = self.runner.host
        return host.adapters.remove_number(host.pipeline, lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Return whether an adapter is loaded. Nothing needs to be pinned, because loaded adapters
        are never evicted.
        """
        return lora_id in self.runner.host.adapters.ids

    def list_loras(self) -> set[int]:
        return self.runner.host.adapters.ids

    def load_lora(
        self, name: str, path: str, weight_name: str | None = None, scale: float = 1.0
    ) -> bool:
        """Load an adapter. Call this method through
        `collective_rpc("load_lora", args=(name, path))`.

        Args:
            name: Adapter name.
            path: Adapter file, or a directory that contains it.
            weight_name: Name of the adapter's file, if `path` is a directory.
            scale: The adapter's default strength.

        Returns:
            False if the adapter is already loaded.

        Raises:
            ValueError: The adapter cannot be loaded.
        """
        host = self.runner.host
        return host.adapters.add_adapter(
            host.pipeline, name, LoraSource(path=path, weight_name=weight_name, scale=scale)
        )

    def unload_lora(self, name: str) -> bool:
        host = self.runner.host
        return host.adapters.remove(host.pipeline, name)

    def loras(self) -> list[str]:
        return self.runner.host.adapters.names

    # -- profiling, health, end --------------------------------------------------------------------

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start or stop vLLM's profiler on the thread that runs the pipeline.

        Raises:
            RuntimeError: Profiling is not configured.
        """
        config = self.vllm_config.profiler_config
        if config is None or config.profiler is None:
            raise RuntimeError(
                "profiling is not configured: start with --profiler-config.profiler=torch "
                "--profiler-config.torch_profiler_dir=DIR"
            )
        if self._profiler is None and not is_start:
            return
        name = f"{profile_prefix}_pipeline" if profile_prefix else "pipeline"
        if self._profiler is None:
            self._profiler = create_worker_profiler(config, worker_name=name, local_rank=0)
            self.runner.on_step = self._profiler.step
        if is_start:
            self._profiler.set_output_name(name)  # an earlier session may have set another name
            set_profiler_kwargs(self._profiler, profiler_kwargs)
            self.runner.on_worker_thread(
                lambda: self._profiler.start(
                    delay_iterations=delay_iterations, max_iterations=max_iterations
                )
            )
        else:
            self.runner.on_worker_thread(self._profiler.stop)

    def check_health(self) -> None:
        if self._shut_down:
            raise RuntimeError("the pipeline executor has been shut down")

    def shutdown(self) -> None:
        if self._shut_down:
            return
        self._shut_down = True
        self.runner.close()
        self.runner.host.close()
        self._cpu_threads.set_threads()


def _device(vllm_config: VllmConfig) -> torch.device:
    """Return the device that this engine runs the pipeline on.

    As in vLLM's worker, the device is determined by the local data-parallel rank.
    """
    kind = vllm_config.device_config.device_type
    if kind != "cuda":
        return torch.device(kind)
    parallel = vllm_config.parallel_config
    if parallel.assigned_physical_gpu_ids is not None:  # --device-ids
        set_assigned_physical_gpu_ids(parallel.assigned_physical_gpu_ids)
    rank = parallel.data_parallel_rank_local
    index = current_platform.logical_device_id_to_visible_device_id(
        parallel.data_parallel_index if rank is None else rank
    )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
