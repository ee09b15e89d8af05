# SPDX-License-Identifier: Apache-2.0
"""`StepPipeline`: the vLLM-facing side of a served pipeline, so that a model folder holds only its
own maths.

vLLM asks a model class for a few attributes before it lets an engine start (a pooling model,
attention-free for its own KV manager, pipeline-parallel capable); the diffusion runner never calls
`forward`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

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
from vllm_omni.model_executor.layers.linear.stored_quantization import StoredQuantization
from vllm_omni.multimodal import NamedTensorsInfo, NamedTensorsProcessor, NoDummyInputs


@attn_type("attention_free")
@MULTIMODAL_REGISTRY.register_processor(
    NamedTensorsProcessor, info=NamedTensorsInfo, dummy_inputs=NoDummyInputs
)
class StepPipeline(
    nn.Module, VllmModelForPooling, IsAttentionFree, SupportsPP, SupportsMultiModal, SupportsLoRA
):
    """Base of every registered pipeline; subclasses implement `SupportsStepExecution` and
    `load_weights`.

    `SupportsLoRA`, adapters or none: vLLM 0.33 asks for it before a family may answer
    (`check_adapters`) which of its models take adapters.
    """

    is_pooling_model: ClassVar[Any] = True
    supports_multimodal_raw_input_only: ClassVar[bool] = True
    supports_step_execution: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)  # a subclass's other base takes other arguments
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
        """Load everything the pipeline needs; strict. Returns the names of all parameters."""
        raise NotImplementedError


Layout = TypeVar("Layout")


@dataclass(frozen=True)
class ServedCheckpoint(Generic[Layout]):
    """Everything the engine says of the checkpoint it serves.

    eager: it was told not to compile anything. quantization: vLLM's config of `--quantization`;
    None = weights stay as they are loaded. kv_dtype: of sessions' keys and values, None = `dtype`.
    offloads: weights are partly on the host.
    """

    hf_config: Any
    layout: Layout
    omni: OmniConfig
    dtype: torch.dtype
    eager: bool
    quantization: QuantizationConfig | None = None
    kv_dtype: torch.dtype | None = None
    offloads: bool = False


@runtime_checkable
class LoadsCheckpoint(Protocol):
    """A model that reads its own checkpoint."""

    def load_checkpoint(self, layout: Any) -> None:
        """Fill every parameter that this rank has, strictly. Raises ValueError."""


class CheckpointPipeline(StepPipeline, Generic[Layout]):
    """A pipeline that finds its checkpoint and owns the model that it builds from it (`model`).

    vLLM loads the pipeline; the diffusion runner drives its model, which knows no engine.
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
        """Find the pieces of the checkpoint below `path`. Raises ValueError."""
        raise NotImplementedError

    def build_model(self, served: ServedCheckpoint[Layout]) -> nn.Module:
        """Build the model, which `LoadsCheckpoint`, on torch's default device; parameters are
        empty until loaded.
        """
        raise NotImplementedError

    def served_layout(self) -> Layout:
        return self.find_layout(Path(self.model_config.model))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load every piece of the checkpoint strictly; `weights` (vLLM's flat file iterator) is
        not touched.
        """
        assert isinstance(self.model, LoadsCheckpoint)
        self.model.load_checkpoint(self.served_layout())
        return {name for name, _ in self.named_parameters()}


def driven_model(pipeline: nn.Module) -> nn.Module:
    """Return the module that the runner drives: the model that a pipeline owns, or the pipeline
    itself.
    """
    return pipeline.model if isinstance(pipeline, CheckpointPipeline) else pipeline


def _quantization(
    quantization: QuantizationConfig | None, hf_config: Any
) -> QuantizationConfig | None:
    """vLLM's config, with the names of the layers that the checkpoint stores in it."""
    stored = getattr(hf_config, "quantization_config", None)
    if quantization is None or stored is None:
        return quantization
    return StoredQuantization(quantization, stored[LAYERS_KEY])


def compiles(requested: bool | None, eager: bool) -> bool:
    """Return the resolved `omni.model.compile`; None = on CUDA, unless the engine was told not
    to compile anything.
    """
    return (torch.cuda.is_available() and not eager) if requested is None else requested


_MOST_CHANNELS = 2560
"""Of a token, over the ranks that share its layers.

The passes of wider networks (LingBot World and causal Wan 14B have
5120) take a GPU longer than the host needs to launch them."""


def launches_graphs(
    requested: bool | None, eager: bool, offloads: bool = False, channels: int = 0
) -> bool:
    """Return the resolved `omni.model.cuda_graphs`; None = unless the engine was told to launch
    kernel by kernel, or fetches weights, or a rank has more `channels` than the host needs time
    for. Never without CUDA.
    """
    pays = not (eager or offloads) and channels <= _MOST_CHANNELS
    return torch.cuda.is_available() and (pays if requested is None else requested)
