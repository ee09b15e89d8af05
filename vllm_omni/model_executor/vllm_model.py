# SPDX-License-Identifier: Apache-2.0
"""`StepPipeline`: implements vLLM's model interface for pipelines that the diffusion runner drives.

vLLM checks a model class before an engine starts. The class must be a pooling model, be
attention-free (so that vLLM creates no K/V cache) and support pipeline parallelism. The diffusion
runner never calls `forward`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import IdentityPooler
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.interfaces import (
    IsAttentionFree,
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.interfaces_base import VllmModelForPooling, attn_type
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.checkpoint.quantization import LAYERS_KEY
from vllm_omni.model_executor.dtypes import kv_cache_dtype
from vllm_omni.model_executor.layers.fast_path import FastPath, Lack, lacks_gpu, this_device
from vllm_omni.model_executor.layers.linear.stored_quantization import StoredQuantization
from vllm_omni.multimodal import NamedTensorsInfo, NamedTensorsProcessor, NoDummyInputs


@attn_type("attention_free")
@MULTIMODAL_REGISTRY.register_processor(
    NamedTensorsProcessor, info=NamedTensorsInfo, dummy_inputs=NoDummyInputs
)
class StepPipeline(
    nn.Module, VllmModelForPooling, IsAttentionFree, SupportsPP, SupportsMultiModal, SupportsLoRA
):
    """Base class of all registered pipelines.

    Subclasses implement `SupportsStepExecution` and `load_weights`. The class implements
    `SupportsLoRA` even if a model supports no adapters, because vLLM 0.33 requires this before the
    family's `check_adapters` can decide whether adapters are supported.
    """

    is_pooling_model: ClassVar[Any] = True
    """Tells vLLM that the engine runs pooling requests. Each pooling request generates one chunk.
    """
    supports_multimodal_raw_input_only: ClassVar[bool] = True
    """Tells vLLM to pass the tensors of a request to the model unchanged, without computing
    embeddings.
    """
    supports_step_execution: ClassVar[bool] = True
    """Tells the runner that the class implements `SupportsStepExecution`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # In a subclass with another base class, `super().__init__` could call that class's
        # `__init__`, which has other parameters.
        nn.Module.__init__(self)
        self.pooler = IdentityPooler()

    def embed_input_ids(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(
            "a diffusion pipeline has no token embeddings; the runner calls denoise_step"
        )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(
            "a diffusion pipeline is driven by denoise_step, never by forward"
        )

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        return IntermediateTensors({})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all weights strictly, and return the names of all parameters."""
        raise NotImplementedError


Layout = TypeVar("Layout")


@dataclass(frozen=True)
class ServedCheckpoint(Generic[Layout]):
    """A checkpoint, and the options that an engine uses to serve it."""

    hf_config: Any
    """vLLM's config object for the checkpoint."""
    layout: Layout
    """Locations of the checkpoint's components."""
    omni: OmniConfig
    """Server options of this package."""
    dtype: torch.dtype
    """Dtype of the model."""
    eager: bool
    """Whether compilation is disabled (`--enforce-eager`)."""
    quantization: QuantizationConfig | None = None
    """vLLM's config for `--quantization`, or None if the weights remain as loaded."""
    kv_dtype: torch.dtype | None = None
    """Dtype of stored keys and values, or None to use the model's dtype."""
    offloads: bool = False
    """Whether some weights are on the host (`--cpu-offload-gb`)."""


@runtime_checkable
class LoadsCheckpoint(Protocol):
    """A model that reads its own checkpoint."""

    def load_checkpoint(self, layout: Any) -> None:
        """Load all parameters of this rank.

        Raises:
            ValueError: A tensor is missing, unexpected or misshapen.
        """


class CheckpointPipeline(StepPipeline, Generic[Layout]):
    """A pipeline that finds its checkpoint, builds a model from it and owns that model (`model`).

    vLLM loads the pipeline. The diffusion runner drives only the model, which does not depend on
    vLLM's engine.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model_config = vllm_config.model_config
        assert isinstance(self.model_config.dtype, torch.dtype)
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        config, eager = self.model_config.hf_config, self.model_config.enforce_eager
        layout, dtype = self.served_layout(), self.model_config.dtype
        kv_dtype = kv_cache_dtype(vllm_config.cache_config.cache_dtype)
        quantization = _quantization(vllm_config.quant_config, config)
        offloads = vllm_config.offload_config.uva.cpu_offload_gb > 0
        try:
            self.model = self.build_model(
                ServedCheckpoint(
                    config, layout, omni, dtype, eager, quantization, kv_dtype, offloads
                )
            )
        except ValueError as error:
            if quantization is None or "kernel" not in str(error):
                raise
            reasons = " ".join(str(error).split())
            raise ValueError(
                f"vLLM has no kernel for {self.model_config.quantization} weights here "
                f"({reasons}); drop "
                "--quantization, or set omni.dequantize to true to read stored ones back "
                "into --dtype"
            ) from error

    def find_layout(self, path: Path) -> Layout:
        """Find the components of the checkpoint in a directory.

        Raises:
            ValueError: A component is missing.
        """
        raise NotImplementedError

    def build_model(self, served: ServedCheckpoint[Layout]) -> nn.Module:
        """Build the model on torch's default device, with uninitialised parameters.

        The model must implement `LoadsCheckpoint`.
        """
        raise NotImplementedError

    def served_layout(self) -> Layout:
        return self.find_layout(Path(self.model_config.model))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all components of the checkpoint strictly.

        The `weights` argument, which is vLLM's iterator over the files of one directory, is not
        used.
        """
        assert isinstance(self.model, LoadsCheckpoint)
        self.model.load_checkpoint(self.served_layout())
        return {name for name, _ in self.named_parameters()}


def driven_model(pipeline: nn.Module) -> nn.Module:
    """Return the module that the runner drives: the pipeline's model, or the pipeline itself."""
    return pipeline.model if isinstance(pipeline, CheckpointPipeline) else pipeline


def _quantization(
    quantization: QuantizationConfig | None, hf_config: Any
) -> QuantizationConfig | None:
    """Return vLLM's quantization config, restricted to the layers that the checkpoint stores in
    quantized form.
    """
    stored = getattr(hf_config, "quantization_config", None)
    if quantization is None or stored is None:
        return quantization
    return StoredQuantization(quantization, stored[LAYERS_KEY])


def compiles(requested: bool | None, eager: bool) -> FastPath:
    """Resolve `omni.model.compile`. By default, compilation is enabled on CUDA unless the engine is
    eager.
    """
    if requested is not None:
        lack = Lack("" if requested else "omni.model.compile is false")
    else:
        lack = lacks_gpu(this_device()) or Lack("--enforce-eager is set" if eager else "")
    return lack.of("compile", "eager operations where there are no kernels")


GRAPH_CHANNELS: Final = 3072
"""Maximum number of channels per rank for CUDA graphs. Forward passes of wider networks (LingBot
World and causal Wan 14B have 5120 channels) take longer on a GPU than their launches take on the
host. Without graphs, a chunk of DreamX-World, which has 3072 channels, took longer at 480x832 than
at 704x1280.
"""


def launches_graphs(
    requested: bool | None,
    eager: bool,
    offloads: bool = False,
    channels: int = 0,
    *,
    name: str = "cuda_graphs",
) -> FastPath:
    """Resolve `omni.model.cuda_graphs`. CUDA graphs are always disabled on devices other than CUDA
    GPUs.

    Args:
        requested: Value of the option. With None, graphs are used unless another argument rules
            them out.
        eager: Whether the engine is eager (`--enforce-eager`).
        offloads: Whether some weights are on the host (`--cpu-offload-gb`).
        channels: Number of channels per token on each rank.
        name: Name of the fast path in reports.
    """
    lack = lacks_gpu(this_device())
    if not lack and requested is False:
        lack = Lack("omni.model.cuda_graphs is false")
    elif not lack and requested is None:
        lack = _graphs_do_not_pay(eager, offloads, channels)
    return lack.of(name, "kernels are launched one by one")


def _graphs_do_not_pay(eager: bool, offloads: bool, channels: int) -> Lack:
    if eager:
        return Lack("--enforce-eager is set")
    if offloads:
        return Lack("weights are offloaded (--cpu-offload-gb)")
    if channels > GRAPH_CHANNELS:
        return Lack(f"with {channels} channels per rank, launches take less time than kernels")
    return Lack()
