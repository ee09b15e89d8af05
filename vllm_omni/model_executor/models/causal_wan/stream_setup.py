# SPDX-License-Identifier: Apache-2.0
"""`StreamSetup`: checkpoint, options and ranks of one `CausalWan`, resolved and checked before anything is built.

Held by tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
"""

from vllm_omni.model_executor.models.causal_wan.checkpoint import CheckpointLayout
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions, read_stream
from vllm_omni.model_executor.models.causal_wan.degradations import TINY_VAE
from vllm_omni.model_executor.models.wan.chunk_setup import WanChunkSetup


class StreamSetup(WanChunkSetup[CausalWanConfig, CausalWanOptions, CheckpointLayout]):
    """Everything a `CausalWan` is built from: of `hf_config(...)["causal_wan"]`."""

    @property
    def wants_tiny_vae(self) -> str | None:
        ladder = f"omni.degradations {TINY_VAE!r}" if TINY_VAE in self.omni.degradations else None
        return super().wants_tiny_vae or ladder

    read_stream = staticmethod(read_stream)
