# SPDX-License-Identifier: Apache-2.0
"""`StreamingSetup`: the checkpoint, options and ranks that a streaming model is built from.

A family adds its own fields in a subclass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.fast_path import FastPath
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.stream import Config, Options, StreamModelSetup
from vllm_omni.model_executor.vllm_model import ServedCheckpoint, compiles, launches_graphs


@dataclass(frozen=True, kw_only=True)
class StreamingSetup(Generic[Config, Options]):
    """Validated inputs that a streaming model is built from."""

    config: Config
    """Architecture of the checkpoint."""
    layout: Any
    """Locations of the checkpoint's components, in the family's own type."""
    options: Options
    """Streaming options of the model."""
    plan: ChunkPlan
    """Chunk plan of the model's streams."""
    omni: OmniConfig
    """Server options."""
    parallel: ParallelContext
    """Position of this rank in the parallel groups."""
    dtype: torch.dtype
    """Dtype of the transformer."""
    compiled: bool
    """Whether pointwise ops are compiled: the resolved `compile` option."""
    cuda_graphs: bool = False
    """Whether the transformer runs in CUDA graphs: the resolved `cuda_graphs` option."""
    text_graphs: bool = False
    """Whether the text encoder runs in CUDA graphs. Unlike `cuda_graphs`, this setting does not
    depend on the width of the transformer, because the text encoder's kernels take longer to launch
    than to run.
    """
    quantization: QuantizationConfig | None = None
    """vLLM's quantization config for the transformer, or None if the weights are not quantized."""
    kv_dtype: torch.dtype | None = None
    """Dtype of stored keys and values. Default: the dtype of the transformer."""
    fast_paths: tuple[FastPath, ...] = ()
    """Fast paths that result from the fields above."""

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
        """Create the setup for a checkpoint.

        Args:
            checkpoint: The family's part of `hf_config`.
            layout: Locations of the checkpoint's components.
            omni: Server options.
            dtype: Dtype of the transformer.
            parallel: Position of this rank in the parallel groups. Default: its position in vLLM's
                groups.
            eager: Whether compilation is disabled (`--enforce-eager`).
            quantization: vLLM's quantization config for the transformer.
            kv_dtype: Dtype of stored keys and values.
            offloads: Whether some weights are on the host (`--cpu-offload-gb`).

        Raises:
            ValueError: The checkpoint does not support the options.
        """
        stream = cls.read_stream(checkpoint, omni)
        options = stream.options
        parallel = parallel or ParallelContext.from_vllm(
            options.sequence_parallel, omni.vae_stage, omni.partition, omni.vae_parallel
        )
        # A preset's `cuda_graphs` replaces only the limit of the width, whereas a value from the
        # user or the world description also overrides --enforce-eager.
        requested = omni.model.get("cuda_graphs")
        channels = 0 if options.cuda_graphs else stream.config.hidden_size // parallel.size
        compiled = compiles(options.compile, eager)
        graphs = launches_graphs(requested, eager, offloads, channels)
        text_graphs = launches_graphs(
            requested, eager, offloads, name="cuda_graphs_of_text_encoder"
        )
        return cls(
            config=stream.config,
            layout=layout,
            options=options,
            plan=stream.plan,
            omni=omni,
            parallel=parallel,
            dtype=dtype,
            compiled=compiled.is_on,
            cuda_graphs=graphs.is_on,
            text_graphs=text_graphs.is_on,
            fast_paths=(compiled, graphs, text_graphs, parallel.peer_path),
            quantization=quantization,
            kv_dtype=kv_dtype,
            **cls.own_fields(checkpoint, stream, omni),
        )

    @classmethod
    def served(cls, checkpoint: Mapping[str, Any], served: ServedCheckpoint[Any]) -> Self:
        """Create the setup for a checkpoint that an engine serves."""
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
        """Combine a checkpoint with the options: the family's `read_stream`.

        Raises:
            ValueError: The checkpoint does not support the options.
        """
        raise NotImplementedError

    @classmethod
    def own_fields(
        cls,
        checkpoint: Mapping[str, Any],
        stream: StreamModelSetup[Config, Options],
        omni: OmniConfig,
    ) -> dict[str, Any]:
        """Return the values of the fields that a subclass adds.

        Raises:
            ValueError: The checkpoint does not support the options.
        """
        return {}
