# SPDX-License-Identifier: Apache-2.0
"""`WanChunkSetup`: checkpoint, options and ranks of one pipeline that streams in chunks; a family adds its own.

Of weights it reads only the tiny decoder's widths, and it asks the device only whether it is there. Held by
tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.wan.architecture import ChunkTransformerConfig
from vllm_omni.model_executor.models.wan.checkpoint import WanComponents
from vllm_omni.model_executor.models.wan.components import VAEConfig
from vllm_omni.model_executor.models.wan.splits import check_decoder_split
from vllm_omni.model_executor.models.wan.tiny_vae import tiny_vae_channels
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.stream import Stream
from vllm_omni.model_executor.vllm_model import ServedCheckpoint, compiles, launches_graphs

Config = TypeVar("Config", bound=ChunkTransformerConfig)
Options = TypeVar("Options", bound=StreamingOptions)
Layout = TypeVar("Layout", bound=WanComponents)


@dataclass(frozen=True)
class WanChunkSetup(Generic[Config, Options, Layout]):
    """Everything such a pipeline is built from, resolved and checked. layout: where the checkpoint's pieces are.

    text_config, image_config: of the encoders for cross-attention; empty without one. dtype: the transformer's.
    compiled, cuda_graphs: the resolved options `compile` and `cuda_graphs`. quantization: of the transformer's weights.
    kv_dtype: the stored keys and values', None = `dtype`.
    """

    config: Config
    vae_config: VAEConfig
    text_config: Mapping[str, Any]
    layout: Layout
    options: Options
    plan: ChunkPlan
    omni: OmniConfig
    parallel: ParallelContext
    dtype: torch.dtype
    compiled: bool
    cuda_graphs: bool = False
    quantization: QuantizationConfig | None = None
    kv_dtype: torch.dtype | None = None
    image_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Mapping[str, Any],
        layout: Layout,
        omni: OmniConfig,
        dtype: torch.dtype,
        parallel: ParallelContext | None = None,
        eager: bool = True,
        quantization: QuantizationConfig | None = None,
        kv_dtype: torch.dtype | None = None,
        offloads: bool = False,
    ) -> Self:
        """Read a family's part of `hf_config`; `parallel` None = vLLM's groups. Raises ValueError.

        eager, offloads: as of `ServedCheckpoint`.
        """
        stream = cls.read_stream(checkpoint, omni)
        options = stream.options
        check_decoder_split(options.decoder, omni)
        return cls(
            config=stream.config,
            vae_config=VAEConfig.from_dict(checkpoint["vae"]),
            text_config=checkpoint.get("umt5", {}),
            layout=layout,
            options=options,
            plan=stream.plan,
            omni=omni,
            parallel=parallel
            or ParallelContext.from_vllm(options.sequence_parallel, omni.vae_stage, omni.partition, omni.vae_parallel),
            dtype=dtype,
            compiled=compiles(options.compile, eager),
            cuda_graphs=launches_graphs(options.cuda_graphs, eager, offloads),
            quantization=quantization,
            kv_dtype=kv_dtype,
            image_config=checkpoint.get("clip", {}),
        )

    @classmethod
    def served(cls, checkpoint: Mapping[str, Any], served: ServedCheckpoint[Layout]) -> Self:
        """`of` a checkpoint that an engine serves."""
        return cls.of(
            checkpoint,
            served.layout,
            served.omni,
            served.dtype,
            eager=served.eager,
            quantization=served.quantization,
            kv_dtype=served.kv_dtype,
            offloads=served.offloads,
        )

    @property
    def wants_tiny_vae(self) -> str | None:
        """The option that needs the tiny decoder, as a user would name it; None = none does."""
        return "omni.model.decoder 'tiny'" if self.options.decoder == "tiny" else None

    @property
    def tiny_vae_channels(self) -> tuple[int, ...] | None:
        """Widths of the tiny decoder, read off its file; None = nothing uses it. Raises ValueError."""
        return None if self.wants_tiny_vae is None else tiny_vae_channels(self.layout.tiny_vae)

    @staticmethod
    def read_stream(checkpoint: Mapping[str, Any], omni: OmniConfig) -> Stream[Config, Options]:
        """The family's `read_stream`. Raises ValueError."""
        raise NotImplementedError
