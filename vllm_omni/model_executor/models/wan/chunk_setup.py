# SPDX-License-Identifier: Apache-2.0
"""Configure, build and load the components of a streaming Wan model.

A model with these components has the attributes of `WanParts`. `WanChunkSetup` does not read
weights, except to determine the tiny decoder's widths.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from torch import nn

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.wan.architecture import ChunkTransformerConfig, VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import WanComponents
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_component_weights
from vllm_omni.model_executor.models.wan.images.image_encoder import ImageEncoder
from vllm_omni.model_executor.models.wan.text_encoder.encoder import (
    AwaitedText,
    TextEncoder,
    text_encoder_of,
)
from vllm_omni.model_executor.models.wan.text_encoder.prompts import SharedPrompts
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import ChunkDecoder
from vllm_omni.model_executor.models.wan.vae.fused_decoder import fused_decoder
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    TinyVAEDecoder,
    load_wanted,
    tiny_vae_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import Rounding, StreamingWanVAE
from vllm_omni.model_executor.streaming.degradations import needs_tiny_decoder
from vllm_omni.model_executor.streaming.model import build_transformer
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.setup import StreamingSetup
from vllm_omni.model_executor.streaming.stream import StreamModelSetup

Config = TypeVar("Config", bound=ChunkTransformerConfig)
Options = TypeVar("Options", bound=StreamingOptions)


@dataclass(frozen=True, kw_only=True)
class WanChunkSetup(StreamingSetup[Config, Options], Generic[Config, Options]):
    """Setup for a pipeline that uses Wan's frozen components. Model families add fields in
    subclasses.
    """

    vae_config: VAEConfig
    """The VAE's architecture."""
    text_config: Mapping[str, Any] = field(default_factory=dict)
    """The text encoder's `UMT5Config` values. Empty if the model has no text encoder."""
    image_config: Mapping[str, Any] = field(default_factory=dict)
    """`CLIPVisionConfig` values of the image encoder for cross-attention. Empty if the model has no
    image encoder.
    """

    @classmethod
    def own_fields(
        cls,
        checkpoint: Mapping[str, Any],
        stream: StreamModelSetup[Config, Options],
        omni: OmniConfig,
    ) -> dict[str, Any]:
        return {
            "vae_config": VAEConfig.from_dict(checkpoint["vae"]),
            "text_config": checkpoint.get("umt5", {}),
            "image_config": checkpoint.get("clip", {}),
        }

    @property
    def tiny_vae_channels(self) -> tuple[int, ...] | None:
        """Read the tiny decoder's widths from its file. Return None if no option needs the tiny
        decoder.

        Raises:
            ValueError: The file is not a TAEHV file.
        """
        if needs_tiny_decoder(self.options, self.omni) is None:
            return None
        return tiny_vae_channels(self.layout.tiny_vae)


# -- components ------------------------------------------------------------------------------------


class WanParts(Protocol):
    """Attributes of a model that uses Wan's components."""

    text_encoder: TextEncoder | AwaitedText | None
    """Text encoder, or None on a VAE stage and in a model that takes no prompts."""
    image_encoder: ImageEncoder | None
    """Image encoder, or None on a VAE stage and in a model that takes no images for
    cross-attention.
    """
    vae: StreamingWanVAE
    """The Wan autoencoder."""
    tiny_vae: TinyVAEDecoder | None
    """Tiny decoder, or None if no option needs it or this rank does not decode."""
    transformer: Any
    """The denoising network."""
    prompts: SharedPrompts
    """Cross-attention K/V of prompts, shared by sessions."""
    options: Any
    """The model's `StreamingOptions`."""
    omni: OmniConfig
    """Server options."""


class ChunkNetworks(NamedTuple):
    """A model's condition encoders and denoising network."""

    text_encoder: TextEncoder | AwaitedText | None
    """Text encoder, or None on a VAE stage and in a model that takes no prompts."""
    image_encoder: ImageEncoder | None
    """Image encoder, or None on a VAE stage and in a model that takes no images for
    cross-attention.
    """
    transformer: Any
    """The denoising network's layers on this rank."""
    prompts: SharedPrompts
    """Cross-attention K/V of prompts, shared by sessions."""


class ChunkAutoencoders(NamedTuple):
    """A model's components that convert between latents and pixels."""

    vae: StreamingWanVAE
    """The Wan autoencoder."""
    tiny_vae: TinyVAEDecoder | None
    """Tiny decoder, or None if no option needs it or this rank does not decode."""
    decoder: ChunkDecoder | None
    """Chunk decoder, or None on ranks that do not decode."""


def build_networks(
    setup: WanChunkSetup[Any, Any],
    network: Callable[..., nn.Module],
    *,
    parallel: ParallelContext | None = None,
    **own: Any,
) -> ChunkNetworks:
    """Build the condition encoders and the transformer. All arguments are passed to
    `build_transformer`.
    """
    text_encoder, image_encoder = _build_text_encoder(setup), _build_image_encoder(setup)
    transformer: Any = build_transformer(setup, network, parallel=parallel, **own)
    prompts = SharedPrompts(transformer.cross_attention_kv)
    return ChunkNetworks(text_encoder, image_encoder, transformer, prompts)


def _build_text_encoder(setup: WanChunkSetup[Any, Any]) -> TextEncoder | AwaitedText | None:
    """Build the text encoder, or `AwaitedText` on a rank that receives text embeddings from another
    rank.
    """
    return text_encoder_of(
        setup.parallel,
        setup.text_config,
        setup.layout.tokenizer,
        max_tokens=setup.config.text_len,
        device=setup.options.text_encoder_device,
        dtype=setup.dtype,
        cuda_graphs=setup.text_graphs,
    )


def _build_image_encoder(setup: WanChunkSetup[Any, Any]) -> ImageEncoder | None:
    """Build the image encoder for cross-attention. Return None if the model has none or if this
    rank is a VAE stage.
    """
    if not setup.image_config or setup.parallel.is_vae_stage:
        return None
    options: StreamingOptions = setup.options
    return ImageEncoder(
        setup.image_config, device=options.text_encoder_device or "model", dtype=setup.dtype
    )


def build_autoencoders(
    setup: WanChunkSetup[Any, Any],
    *,
    encodes: bool,
    rounding: Rounding = "round",
    frames_per_call: int | None = None,
    continuation: Literal["cache", "restart"] = "cache",
) -> ChunkAutoencoders:
    """Build the VAE, the chunk decoder and, if an option needs it, the tiny decoder.

    Args:
        setup: The model's setup.
        encodes: Whether to build the VAE's encoder on this rank.
        rounding: How this model's original code rounds pixel values to uint8 levels.
        frames_per_call: Passed to `StreamingWanVAE`.
        continuation: Passed to `ChunkDecoder`.
    """
    dtype, decodes = setup.options.vae_torch_dtype(setup.dtype), setup.parallel.decodes
    bands = RowBands.of_parallel(setup.parallel, setup.vae_config.spatial_factor)
    vae = StreamingWanVAE(
        setup.vae_config,
        encoder=encodes,
        decoder=decodes and setup.options.decoder == "wan",
        dtype=dtype,
        compiled=setup.compiled,
        frames_per_call=frames_per_call,
        bands=bands,
        fuse=partial(fused_decoder, cuda_graphs=setup.cuda_graphs and bands is not None),
    )
    channels = setup.tiny_vae_channels  # read on every rank, so that every rank validates the file
    tiny = None
    if decodes and channels is not None:
        tiny = TinyVAEDecoder(channels, setup.vae_config, dtype=dtype)
    if not decodes:
        return ChunkAutoencoders(vae, tiny, None)
    if tiny is not None and setup.options.decoder == "tiny":
        return ChunkAutoencoders(vae, tiny, ChunkDecoder(tiny, rounding=rounding))
    height, width = setup.config.latent_size(setup.omni.height, setup.omni.width)
    decoder = ChunkDecoder(
        vae, tiny, rounding=rounding, continuation=continuation, largest_cells=height * width
    )
    return ChunkAutoencoders(vae, tiny, decoder)


def load_parts(
    model: WanParts,
    layout: WanComponents,
    load_transformer: Callable[[], None],
) -> None:
    """Load all of this rank's parameters strictly.

    Args:
        model: Model whose parameters are loaded. Values cached from earlier weights are cleared.
        layout: Locations of the checkpoint's components.
        load_transformer: Function that loads this rank's transformer layers and shards.

    Raises:
        ValueError: A component is missing or does not match the model.
    """
    vae = model.vae if model.vae.has_encoder or model.vae.has_decoder else None
    load_component_weights(layout, load_transformer, vae, model.text_encoder, model.image_encoder)
    load_wanted(model.tiny_vae, layout, needs_tiny_decoder(model.options, model.omni))
    model.transformer.clear_derived()
    model.prompts.clear_prompt()
