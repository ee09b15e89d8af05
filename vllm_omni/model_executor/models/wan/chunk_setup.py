# SPDX-License-Identifier: Apache-2.0
"""`WanChunkSetup`: the setup of a pipeline with Wan 2.1's frozen components; a family adds its own.

Of weights it reads only the tiny decoder's widths, and it asks the device only whether it is there. Held by
tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.wan.architecture import ChunkTransformerConfig
from vllm_omni.model_executor.models.wan.checkpoint import WanComponents
from vllm_omni.model_executor.models.wan.components import VAEConfig
from vllm_omni.model_executor.models.wan.splits import check_decoder_split
from vllm_omni.model_executor.models.wan.tiny_vae import tiny_vae_channels
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.setup import StreamingSetup
from vllm_omni.model_executor.streaming.stream import Stream

Config = TypeVar("Config", bound=ChunkTransformerConfig)
Options = TypeVar("Options", bound=StreamingOptions)
Layout = TypeVar("Layout", bound=WanComponents)


@dataclass(frozen=True, kw_only=True)
class WanChunkSetup(StreamingSetup[Config, Options, Layout], Generic[Config, Options, Layout]):
    """text_config, image_config: of the encoders for cross-attention; empty without one."""

    vae_config: VAEConfig
    text_config: Mapping[str, Any] = field(default_factory=dict)
    image_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def own_fields(
        cls, checkpoint: Mapping[str, Any], stream: Stream[Config, Options], omni: OmniConfig
    ) -> dict[str, Any]:
        check_decoder_split(stream.options.decoder, omni)
        return {
            "vae_config": VAEConfig.from_dict(checkpoint["vae"]),
            "text_config": checkpoint.get("umt5", {}),
            "image_config": checkpoint.get("clip", {}),
        }

    @property
    def wants_tiny_vae(self) -> str | None:
        """The option that needs the tiny decoder, as a user would name it; None = none does."""
        return "omni.model.decoder 'tiny'" if self.options.decoder == "tiny" else None

    @property
    def tiny_vae_channels(self) -> tuple[int, ...] | None:
        """Widths of the tiny decoder, read off its file; None = nothing uses it. Raises ValueError."""
        return None if self.wants_tiny_vae is None else tiny_vae_channels(self.layout.tiny_vae)
