# SPDX-License-Identifier: Apache-2.0
"""`PipelineHost`: owns one loaded pipeline: where its weights are, which adapters are active, a fresh call object.

It knows no requests and no scheduler. Weights are safetensors; a checkpoint's own code is never run. Held by
tests/executor/test_pipeline_host.py.
"""

import copy
import gc
import logging
import time
from pathlib import Path
from typing import Any

import torch

from vllm_omni.executor.adapters import Adapters
from vllm_omni.executor.random_weights import random_components
from vllm_omni.model_executor.models.diffusers_pipeline.checkpoint import (
    PipelineIndex,
    check_class,
    check_components,
    check_weights,
)
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions
from vllm_omni.seeds import nth_seed

logger = logging.getLogger("vllm." + __name__)


class PipelineHost:
    """device: where the pipeline runs. dtype: of all components that `options.component_dtypes` leaves out.

    random_weights: `--load-format dummy`: configs are read, weights are drawn on the device (for measuring).
    """

    def __init__(
        self,
        path: Path,
        options: DiffusersOptions,
        device: torch.device,
        dtype: torch.dtype,
        *,
        random_weights: bool = False,
    ) -> None:
        self.path, self.options, self.device, self.dtype = path, options, device, dtype
        self.random_weights = random_weights
        if options.offload != "none" and device.type == "cpu":
            raise ValueError(
                f"omni.model.offload {options.offload!r} needs an accelerator: on a CPU the weights are in host memory "
                "already; drop the option"
            )
        if options.offload != "none":
            try:
                import accelerate  # noqa: F401
            except ImportError as error:
                raise ValueError("omni.model.offload needs the package 'accelerate': pip install accelerate") from error
        self.adapters = Adapters(options.loras)
        self._pipeline: Any = None
        self._asleep_level = 0
        self.load()

    @property
    def pipeline(self) -> Any:
        """The pipeline itself. Raises RuntimeError while its weights are dropped (sleep level 2)."""
        if self._pipeline is None:
            raise RuntimeError("the pipeline's weights were dropped by sleep level 2; wake it up first")
        return self._pipeline

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers, wherever they are."""
        if self._pipeline is None:
            return 0
        modules = [part for part in self._pipeline.components.values() if isinstance(part, torch.nn.Module)]
        tensors = {id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def load(self) -> None:
        """Load the components and put them where the options say; adapters of the deployment's table come along."""
        import diffusers

        options, started_s = self.options, time.perf_counter()
        index = PipelineIndex.read(self.path)
        class_name = options.pipeline_class or index.class_name
        check_class(class_name)
        check_components(self.path, index, options.without)
        unknown = sorted(set(options.component_dtypes) - set(index.components))
        if unknown:
            raise ValueError(f"omni.model.component_dtypes: {unknown[0]!r} is none of {', '.join(index.components)}")
        dtypes = {name: getattr(torch, dtype) for name, dtype in options.component_dtypes.items()}
        random: dict[str, Any] = {}
        if self.random_weights:
            # With offloading, weights belong on the host until a hook fetches them.
            place = self.device if options.offload == "none" else torch.device("cpu")
            random = random_components(self.path, index, options.without, dtypes, self.dtype, place)
        else:
            check_weights(self.path, index, options.without)
        pipeline = getattr(diffusers, class_name).from_pretrained(
            self.path,
            dtype={"default": self.dtype, **dtypes} if dtypes else self.dtype,
            use_safetensors=True,
            local_files_only=True,
            **({} if options.variant is None else {"variant": options.variant}),
            **dict.fromkeys((*options.without, *index.absent)),
            **random,
        )
        pipeline.set_progress_bar_config(disable=True)
        self._configure(pipeline)
        self.adapters.load_all(pipeline)
        if options.offload == "none":
            pipeline.to(self.device)
        elif options.offload == "model":
            pipeline.enable_model_cpu_offload(device=self.device)
        else:
            pipeline.enable_sequential_cpu_offload(device=self.device)
        self._pipeline = pipeline
        logger.info(
            "%s of %.2f GiB is on %s (offload: %s) after %.1f s",
            class_name,
            self.nbytes / 2**30,
            self.device,
            options.offload,
            time.perf_counter() - started_s,
        )

    def reload(self, path: Path | None = None) -> None:
        """Load again, from another directory of the same pipeline class if `path` is given. Raises ValueError."""
        if path is not None:
            other = PipelineIndex.read(path).class_name
            if other != PipelineIndex.read(self.path).class_name:
                raise ValueError(f"{path} holds a {other}, not the class that is served")
            self.path = path
        self._pipeline = None
        gc.collect()
        self.load()
        self._asleep_level = 0

    def close(self) -> None:
        """Free the weights; idempotent."""
        self._pipeline = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _configure(self, pipeline: Any) -> None:
        if self.options.vae_tiling:
            vae = pipeline.components.get("vae")
            if not hasattr(vae, "enable_tiling"):
                raise ValueError(f"omni.model.vae_tiling: the VAE of {type(pipeline).__name__} has no tiling")
            vae.enable_tiling()
            if hasattr(vae, "enable_slicing"):
                vae.enable_slicing()
        if self.options.attention_backend is not None:
            denoiser = pipeline.components.get("transformer")
            if denoiser is None:
                raise ValueError("omni.model.attention_backend: this pipeline has no transformer")
            denoiser.set_attention_backend(self.options.attention_backend)

    def call_object(self) -> Any:
        """A pipeline to call once: the loaded modules with call state and scheduler of its own.

        Calls may then be interleaved step by step, and one that is given up leaves nothing behind. Offloading keeps
        hooks on the pipeline object itself, so there it is that object with a fresh scheduler.
        """
        pristine = self.pipeline
        pipeline = copy.copy(pristine) if self.options.offload == "none" else pristine
        if "scheduler" in pristine.components:
            pipeline.scheduler = copy.deepcopy(pristine.scheduler)
        return pipeline

    def after_abandoned_call(self) -> None:
        """Bring offloaded weights back to the host after a call that did not reach its own end."""
        if self.options.offload == "model" and self._pipeline is not None:
            self._pipeline.maybe_free_model_hooks()

    def generators(self, seed: int, count: int) -> Any:
        """The noise sources of one call: seeded `seed`, `seed + 1`, ... (one alone is no list)."""
        sources = [torch.Generator(self.device).manual_seed(nth_seed(seed, number)) for number in range(count)]
        return sources[0] if count == 1 else sources

    # -- sleep -------------------------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        return self._asleep_level > 0

    def sleep(self, level: int) -> dict[str, int]:
        """Level 1: weights move to the host. Level 2: they are dropped, and read from disk again on waking.

        Returns the bytes freed on the device. On a CPU level 1 frees nothing: the weights are on the host already.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level}")
        before = self._device_bytes()
        if level == 2:
            self._pipeline = None
        elif self.options.offload == "none":
            self.pipeline.to("cpu")
        self._asleep_level = level
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {"freed": before - self._device_bytes()}

    def wake_up(self) -> None:
        """Undo `sleep`; idempotent."""
        if self._asleep_level == 2:
            self.load()
        elif self._asleep_level == 1 and self.options.offload == "none":
            self.pipeline.to(self.device)
        self._asleep_level = 0

    def _device_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        return 0 if self._pipeline is None else self.nbytes
