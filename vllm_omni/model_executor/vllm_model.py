# SPDX-License-Identifier: Apache-2.0
"""`StepPipeline`: the vLLM-facing side of a served pipeline, so that a model folder holds only its own maths.

vLLM asks a model class for a few attributes before it lets an engine start (a pooling model, attention-free for its
own KV manager, pipeline-parallel capable); the diffusion runner never calls `forward`.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import IdentityPooler
from vllm.model_executor.models.interfaces import IsAttentionFree, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.interfaces_base import VllmModelForPooling, attn_type
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from vllm_omni.multimodal import NamedTensorsInfo, NamedTensorsProcessor, NoDummyInputs


@attn_type("attention_free")
@MULTIMODAL_REGISTRY.register_processor(NamedTensorsProcessor, info=NamedTensorsInfo, dummy_inputs=NoDummyInputs)
class StepPipeline(nn.Module, VllmModelForPooling, IsAttentionFree, SupportsPP, SupportsMultiModal):
    """Base of every registered pipeline; subclasses implement `SupportsStepExecution` and `load_weights`."""

    is_pooling_model: ClassVar[Any] = True
    supports_multimodal_raw_input_only: ClassVar[bool] = True
    supports_step_execution: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.pooler = IdentityPooler()

    def embed_input_ids(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("a diffusion pipeline has no token embeddings; the runner calls denoise_step")

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("a diffusion pipeline is driven by denoise_step, never by forward")

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        return IntermediateTensors({})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load everything the pipeline needs; strict. Returns the names of all parameters."""
        raise NotImplementedError


def compiles(asked: bool | None, eager: bool) -> bool:
    """Return what `omni.model.compile` comes to; None = on CUDA, unless the engine was told not to compile anything."""
    return (torch.cuda.is_available() and not eager) if asked is None else asked
