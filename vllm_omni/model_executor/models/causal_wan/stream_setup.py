# SPDX-License-Identifier: Apache-2.0
"""`StreamSetup`: checkpoint, options and ranks of one `CausalWan`, resolved and checked before anything is built.

Of weights it reads only the tiny decoder's widths. Held by
tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan import degradations
from vllm_omni.model_executor.models.causal_wan.checkpoint import CheckpointLayout
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions
from vllm_omni.model_executor.models.wan.chunk_setup import WanChunkSetup
from vllm_omni.model_executor.models.wan.tiny_vae import tiny_vae_channels


@dataclass(frozen=True)
class StreamSetup(WanChunkSetup[CausalWanConfig, CausalWanOptions, CheckpointLayout]):
    """Everything a `CausalWan` is built from: of `hf_config(...)["causal_wan"]`.

    tiny_vae_channels: widths of the tiny decoder, None = nothing uses it.
    """

    tiny_vae_channels: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Mapping[str, Any],
        layout: CheckpointLayout,
        omni: OmniConfig,
        dtype: torch.dtype,
        parallel: ParallelContext | None = None,
        eager: bool = True,
    ) -> Self:
        setup = super().of(checkpoint, layout, omni, dtype, parallel, eager)
        if degradations.wants_tiny_vae(setup.options, omni) is None:
            return setup
        return replace(setup, tiny_vae_channels=tiny_vae_channels(layout.tiny_vae))

    @classmethod
    def _read(cls, checkpoint: Mapping[str, Any], omni: OmniConfig) -> tuple[CausalWanConfig, CausalWanOptions]:
        options = CausalWanOptions.parse(omni.model)
        if options.decoder == "tiny" and omni.vae_parallel:
            raise ValueError("omni.vae_parallel splits decoder 'wan' over ranks; decoder 'tiny' is too small to gain")
        return CausalWanConfig.from_checkpoint(checkpoint["transformer"]), options
