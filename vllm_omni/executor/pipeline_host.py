# SPDX-License-Identifier: Apache-2.0
"""`PipelineHost`: owns one loaded pipeline, its weights and its adapters.

This module does not depend on requests or the scheduler. Weights are loaded only from safetensors
files, and code from checkpoints is never executed.
"""

import copy
import gc
import logging
import time
from pathlib import Path
from typing import Any

import torch

from vllm_omni.executor.adapters import PipelineAdapters
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
    """A loaded pipeline.

    Args:
        path: Pipeline directory.
        options: Deployment options.
        device: The pipeline's device.
        dtype: Dtype of all components that are not listed in `options.component_dtypes`.
        random_weights: Whether to generate random weights on the device instead of loading weights.
            Set by `--load-format dummy`, for benchmarking.

    Raises:
        ValueError: The directory or an option is not supported.
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
                f"omni.model.offload {options.offload!r} requires an accelerator: on a CPU the "
                "weights are already in "
                "host memory; remove the option"
            )
        if options.offload != "none":
            try:
                import accelerate  # noqa: F401
            except ImportError as error:
                raise ValueError(
                    "omni.model.offload requires the package 'accelerate': pip install accelerate"
                ) from error
        self.adapters = PipelineAdapters(options.loras)
        self._pipeline: Any = None
        self._asleep_level = 0
        self.load()

    @property
    def pipeline(self) -> Any:
        """The loaded pipeline.

        Raises:
            RuntimeError: The weights have been discarded (sleep level 2).
        """
        if self._pipeline is None:
            raise RuntimeError(
                "the pipeline's weights were discarded by sleep level 2; wake it up first"
            )
        return self._pipeline

    @property
    def nbytes(self) -> int:
        """Total size in bytes of the pipeline's parameters and buffers, on all devices."""
        if self._pipeline is None:
            return 0
        modules = [
            part for part in self._pipeline.components.values() if isinstance(part, torch.nn.Module)
        ]
        tensors = {
            id(tensor): tensor
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
        }
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def load(self) -> None:
        """Load the components onto the devices that the options specify, and load the configured
        adapters.

        Raises:
            ValueError: The directory or an option is not supported.
        """
        import diffusers

        options, started_s = self.options, time.perf_counter()
        index = PipelineIndex.read_folder(self.path)
        class_name = options.pipeline_class or index.class_name
        check_class(class_name)
        check_components(self.path, index, options.without)
        unknown = sorted(set(options.component_dtypes) - set(index.components))
        if unknown:
            raise ValueError(
                f"omni.model.component_dtypes: {unknown[0]!r} is none of "
                f"{', '.join(index.components)}"
            )
        dtypes = {name: getattr(torch, dtype) for name, dtype in options.component_dtypes.items()}
        random: dict[str, Any] = {}
        if self.random_weights:
            # With offloading, weights stay on the host until a hook moves them.
            position = self.device if options.offload == "none" else torch.device("cpu")
            random = random_components(
                self.path, index, options.without, dtypes, self.dtype, position
            )
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
            "%s of %.2f GiB loaded on %s (offload: %s) in %.1f s",
            class_name,
            self.nbytes / 2**30,
            self.device,
            options.offload,
            time.perf_counter() - started_s,
        )

    def reload(self, path: Path | None = None) -> None:
        """Load the pipeline again.

        Args:
            path: Directory that contains a pipeline of the same class, or None for the current
                directory.

        Raises:
            ValueError: The pipeline class differs from the current one, or the directory is not
                supported.
        """
        if path is not None:
            other = PipelineIndex.read_folder(path).class_name
            if other != PipelineIndex.read_folder(self.path).class_name:
                raise ValueError(
                    f"{path} contains a {other}, not the pipeline class that is served"
                )
            self.path = path
        self._pipeline = None
        gc.collect()
        self.load()
        self._asleep_level = 0

    def close(self) -> None:
        """Free the weights. Idempotent."""
        self._pipeline = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _configure(self, pipeline: Any) -> None:
        if self.options.vae_tiling:
            vae = pipeline.components.get("vae")
            if not hasattr(vae, "enable_tiling"):
                raise ValueError(
                    f"omni.model.vae_tiling: the VAE of {type(pipeline).__name__} has no tiling"
                )
            vae.enable_tiling()
            if hasattr(vae, "enable_slicing"):
                vae.enable_slicing()
        if self.options.attention_backend is not None:
            denoiser = pipeline.components.get("transformer")
            if denoiser is None:
                raise ValueError("omni.model.attention_backend: this pipeline has no transformer")
            denoiser.set_attention_backend(self.options.attention_backend)

    def call_object(self) -> Any:
        """Return a pipeline object for one call.

        The object shares the loaded modules but has its own state and its own scheduler. Calls can
        therefore be interleaved step by step, and an abandoned call does not affect other calls.
        With offloading, the loaded pipeline itself is returned with a new scheduler, because
        offloading stores hooks on the pipeline object.
        """
        pristine = self.pipeline
        pipeline = copy.copy(pristine) if self.options.offload == "none" else pristine
        if "scheduler" in pristine.components:
            pipeline.scheduler = copy.deepcopy(pristine.scheduler)
        return pipeline

    def after_abandoned_call(self) -> None:
        """Move offloaded weights back to the host after a call that was not completed."""
        if self.options.offload == "model" and self._pipeline is not None:
            self._pipeline.maybe_free_model_hooks()

    def generators(self, seed: int, count: int) -> Any:
        """Return the noise generators for a call, with seeds `seed`, `seed + 1`, and so on.

        Returns:
            A list of generators, or a single generator if `count` is 1.
        """
        sources = [
            torch.Generator(self.device).manual_seed(nth_seed(seed, number))
            for number in range(count)
        ]
        return sources[0] if count == 1 else sources

    # -- sleep -------------------------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        return self._asleep_level > 0

    def sleep(self, level: int) -> dict[str, int]:
        """Free device memory.

        Args:
            level: Level 1 moves the weights to the host. Level 2 discards the weights; `wake_up`
                then loads them from disk.

        Returns:
            A dict whose `freed` entry is the number of bytes freed on the device. On a CPU, level 1
            frees nothing.

        Raises:
            ValueError: The level is invalid.
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
        """Undo `sleep`. Idempotent."""
        if self._asleep_level == 2:
            self.load()
        elif self._asleep_level == 1 and self.options.offload == "none":
            self.pipeline.to(self.device)
        self._asleep_level = 0

    def _device_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        return 0 if self._pipeline is None else self.nbytes
