# SPDX-License-Identifier: Apache-2.0
"""`StreamSetup`: checkpoint, options and ranks of one `CausalWan`, resolved and checked before anything is built.

Of weights it reads only the tiny decoder's widths; it asks the device only whether it is there. Held by
tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan import degradations
from vllm_omni.model_executor.models.causal_wan.checkpoint import CheckpointLayout
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions
from vllm_omni.model_executor.models.wan.components import VAEConfig
from vllm_omni.model_executor.models.wan.tiny_vae import tiny_vae_channels
from vllm_omni.model_executor.vllm_model import compiles


@dataclass(frozen=True)
class StreamSetup:
    """Everything a `CausalWan` is built from, resolved and checked. dtype: the transformer's.

    tiny_vae_channels: widths of the tiny decoder, None = nothing uses it. compiled: what `options.compile` comes to.
    """

    config: CausalWanConfig
    vae_config: VAEConfig
    text_config: Mapping[str, Any]
    tokenizer: Path | None
    options: CausalWanOptions
    omni: OmniConfig
    parallel: ParallelContext
    dtype: torch.dtype
    tiny_vae_channels: tuple[int, ...] | None = None
    compiled: bool = False

    @classmethod
    def of(
        cls,
        checkpoint: Mapping[str, Any],
        layout: CheckpointLayout,
        omni: OmniConfig,
        dtype: torch.dtype,
        parallel: ParallelContext | None = None,
        eager: bool = True,
    ) -> "StreamSetup":
        """Read a checkpoint's `hf_config(...)["causal_wan"]`; `parallel` None = vLLM's groups. Raises ValueError.

        eager: the engine was told not to compile anything.
        """
        options = CausalWanOptions.parse(omni.model)
        if options.decoder == "tiny" and omni.vae_parallel:
            raise ValueError("omni.vae_parallel splits decoder 'wan' over ranks; decoder 'tiny' is too small to gain")
        wants_tiny = degradations.wants_tiny_vae(options, omni) is not None
        return cls(
            config=CausalWanConfig.from_checkpoint(checkpoint["transformer"]),
            vae_config=VAEConfig.from_dict(checkpoint["vae"]),
            text_config=checkpoint["umt5"],
            tokenizer=layout.tokenizer,
            options=options,
            omni=omni,
            parallel=parallel
            or ParallelContext.from_vllm(options.sequence_parallel, omni.vae_stage, omni.partition, omni.vae_parallel),
            dtype=dtype,
            tiny_vae_channels=tiny_vae_channels(layout.tiny_vae) if wants_tiny else None,
            compiled=compiles(options.compile, eager),
        )
