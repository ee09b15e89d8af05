# SPDX-License-Identifier: Apache-2.0
"""`StreamingSetup`: checkpoint, options and ranks of one pipeline that streams in chunks; a family
adds its own.

Held by tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.stream import Config, Options, StreamModelSetup
from vllm_omni.model_executor.vllm_model import ServedCheckpoint, compiles, launches_graphs


@dataclass(frozen=True, kw_only=True)
class StreamingSetup(Generic[Config, Options]):
    """Everything such a pipeline is built from, resolved and checked."""

    config: Config
    layout: Any
    """Where the components of the checkpoint are, in the family's own type."""
    options: Options
    plan: ChunkPlan
    omni: OmniConfig
    parallel: ParallelContext
    dtype: torch.dtype
    """Of the transformer."""
    compiled: bool
    """The resolved option `compile`."""
    cuda_graphs: bool = False
    """The resolved option `cuda_graphs`."""
    text_graphs: bool = False
    """`cuda_graphs` of the text encoder, which takes the host longer however wide the
    transformer is.
    """
    quantization: QuantizationConfig | None = None
    """Of the transformer's weights."""
    kv_dtype: torch.dtype | None = None
    """Of the stored keys and values. Default: `dtype`."""

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Mapping[str, Any],
        layout: Any,
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
        parallel = parallel or ParallelContext.from_vllm(
            options.sequence_parallel, omni.vae_stage, omni.partition, omni.vae_parallel
        )
        channels = stream.config.hidden_size // parallel.size
        return cls(
            config=stream.config,
            layout=layout,
            options=options,
            plan=stream.plan,
            omni=omni,
            parallel=parallel,
            dtype=dtype,
            compiled=compiles(options.compile, eager),
            cuda_graphs=launches_graphs(options.cuda_graphs, eager, offloads, channels),
            text_graphs=launches_graphs(options.cuda_graphs, eager, offloads),
            quantization=quantization,
            kv_dtype=kv_dtype,
            **cls.own_fields(checkpoint, stream, omni),
        )

    @classmethod
    def served(cls, checkpoint: Mapping[str, Any], served: ServedCheckpoint[Any]) -> Self:
        """`of` a checkpoint that an engine serves."""
        return cls.of_checkpoint(
            checkpoint,
            served.layout,
            served.omni,
            served.dtype,
            eager=served.eager,
            quantization=served.quantization,
            kv_dtype=served.kv_dtype,
            offloads=served.offloads,
        )

    @staticmethod
    def read_stream(
        checkpoint: Mapping[str, Any], omni: OmniConfig
    ) -> StreamModelSetup[Config, Options]:
        """The family's `read_stream`. Raises ValueError."""
        raise NotImplementedError

    @classmethod
    def own_fields(
        cls,
        checkpoint: Mapping[str, Any],
        stream: StreamModelSetup[Config, Options],
        omni: OmniConfig,
    ) -> dict[str, Any]:
        """Fields that a subclass adds, checked. Raises ValueError."""
        return {}
