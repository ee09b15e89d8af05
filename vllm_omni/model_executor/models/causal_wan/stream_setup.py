# SPDX-License-Identifier: Apache-2.0
"""`StreamSetup`: checkpoint, options and ranks of one `CausalWan`, resolved and checked before anything is built.

Of weights it reads only the tiny decoder's widths. Held by
tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
"""

from collections.abc import Mapping
from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.causal_wan import degradations
from vllm_omni.model_executor.models.causal_wan.checkpoint import CheckpointLayout
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions
from vllm_omni.model_executor.models.wan.chunk_setup import WanChunkSetup
from vllm_omni.model_executor.models.wan.tiny_vae import tiny_vae_channels


class StreamSetup(WanChunkSetup[CausalWanConfig, CausalWanOptions, CheckpointLayout]):
    """Everything a `CausalWan` is built from: of `hf_config(...)["causal_wan"]`."""

    @property
    def tiny_vae_channels(self) -> tuple[int, ...] | None:
        """Widths of the tiny decoder, read off its file; None = nothing uses it. Raises ValueError."""
        wanted = degradations.wants_tiny_vae(self.options, self.omni) is not None
        return tiny_vae_channels(self.layout.tiny_vae) if wanted else None

    @classmethod
    def _read(cls, checkpoint: Mapping[str, Any], omni: OmniConfig) -> tuple[CausalWanConfig, CausalWanOptions]:
        options = CausalWanOptions.parse(omni.model)
        if options.decoder == "tiny" and omni.vae_parallel:
            raise ValueError("omni.vae_parallel splits decoder 'wan' over ranks; decoder 'tiny' is too small to gain")
        return CausalWanConfig.from_checkpoint(checkpoint["transformer"]), options
