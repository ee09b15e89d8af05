# SPDX-License-Identifier: Apache-2.0
"""`WanChunkModel`: the parts of a streaming model around its transformer: encoders for its context, VAE, tiny decoder.

A family's `build` calls `_begin` and `_add_components`. Of a chunk's life it brings
`prepare_encode`, and per forward `begin_step` and `rows`.
Held by the pipeline tests of causal Wan and LingBot World.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch

from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs, SupportsStepExecution
from vllm_omni.model_executor.models.wan.architecture import ChunkTransformerConfig
from vllm_omni.model_executor.models.wan.checkpoint import WanComponents
from vllm_omni.model_executor.models.wan.chunk_decoder import ChunkDecoder
from vllm_omni.model_executor.models.wan.chunk_setup import WanChunkSetup
from vllm_omni.model_executor.models.wan.fused_decoder import fused_decoder
from vllm_omni.model_executor.models.wan.image_encoder import ImageEncoder
from vllm_omni.model_executor.models.wan.prompts import SharedPrompts
from vllm_omni.model_executor.models.wan.split_decode import RowBands, whole_frames
from vllm_omni.model_executor.models.wan.text_encoder import AwaitedText, TextEncoder, text_encoder_of
from vllm_omni.model_executor.models.wan.tiny_vae import TinyVAEDecoder, load_wanted
from vllm_omni.model_executor.models.wan.vae import Rounding, StreamingWanVAE, to_uint8
from vllm_omni.model_executor.models.wan.weights import load_pieces
from vllm_omni.model_executor.streaming.model import Chunk, Session, Shape, StreamingModel
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.setup import StreamingSetup

Setup = TypeVar("Setup", bound=WanChunkSetup[Any, Any, Any])
Layout = TypeVar("Layout", bound=WanComponents)


class WanChunkModel(StreamingModel[Shape, Session, Chunk], Generic[Shape, Session, Chunk, Setup, Layout]):
    """Base of a streaming model with Wan 2.1's frozen components."""

    rounding: ClassVar[Rounding] = "round"
    """Of pixels to uint8 levels; a family follows its original."""

    config: ChunkTransformerConfig
    options: StreamingOptions
    text_encoder: TextEncoder | AwaitedText | None
    image_encoder: ImageEncoder | None
    """None on a VAE stage, and of a model that takes no prompts, or no images for cross-attention."""
    vae: StreamingWanVAE
    tiny_vae: TinyVAEDecoder | None
    decoder: ChunkDecoder | None
    """None on a rank that does not decode."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.build(setup)

    @abstractmethod
    def build(self, setup: Setup) -> None:
        """Create the sub-modules, in torch's default device; parameters are empty until loaded."""

    @abstractmethod
    def load_transformer(self, layout: Layout) -> None:
        """Load this rank's part of the transformer, strictly. Raises ValueError."""

    def load_checkpoint(self, layout: Layout) -> None:
        """Fill every parameter this rank has, strictly. Raises ValueError."""
        vae = self.vae if self.vae.has_encoder or self.vae.has_decoder else None
        load_pieces(layout, lambda: self.load_transformer(layout), vae, self.text_encoder, self.image_encoder)
        load_wanted(self.tiny_vae, layout, self._wants_tiny_vae)
        self.transformer.forget()
        self.prompts.forget()

    def window_sizes(self, height: int, width: int) -> dict[str, Any]:
        """Arguments of this rank's `KVWindow`s but their frames. height, width: of the video, in pixels."""
        return {
            "num_layers": self.transformer.num_local_layers,
            "tokens_per_frame": self.config.tokens_per_frame(height, width),
            "num_heads": self.transformer.num_cache_heads,
            "head_dim": self.config.head_dim,
            "dtype": self.transformer.dtype,
            "storage": self.kv_dtype,
        }

    @abstractmethod
    def warmup_inputs(self) -> list[Inputs]:
        """Chunks of the largest size, each kind of work once."""

    # -- one chunk -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare_encode(self, request: DiffusionRequest[Session, Chunk]) -> None:
        """Check a chunk's request and make its `state`. Raises `RequestFailed`."""

    @abstractmethod
    def begin_step(self, request: DiffusionRequest[Session, Chunk]) -> None:
        """Make the inputs that a chunk's forwards share, once (collective under tensor parallelism)."""

    @abstractmethod
    def rows(self, request: DiffusionRequest[Session, Chunk]) -> Sequence[object]:
        """The rows of a chunk's next forward, as the transformer takes them."""

    def decodes_tiny(self, request: DiffusionRequest[Session, Chunk]) -> bool:
        """Whether a chunk's frames come from the second, tiny decoder."""
        return False

    @torch.no_grad()
    def denoise_step(
        self, batch: Sequence[DiffusionRequest[Session, Chunk]], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        for request in batch:
            self.begin_step(request)
        rows = [row for request in batch for row in self.rows(request)]
        kv_only = all(request.work.denoise_index(request.step) is None for request in batch)
        prediction: torch.Tensor = self.transformer(rows, hidden, kv_only=kv_only)
        return prediction

    def decode(self, request: DiffusionRequest[Session, Chunk]) -> dict[str, torch.Tensor]:
        chunk, before, tiny = request.work, request.session.decoder_cache, self.decodes_tiny(request)
        assert self.decoder is not None, "ranks of the last stage decode: one, or all of them together"
        pixels, chunk.decoder_cache = self.decoder.decode(chunk.latents.unsqueeze(0), before, tiny=tiny)
        return whole_frames(to_uint8(pixels, self.rounding), None if tiny else self.vae.bands)

    # -- several sessions' chunks in one decode ------------------------------------------------------------------------

    def most_decoded_together(self, request: DiffusionRequest[Session, Chunk]) -> int:
        if self.decoder is None or self.decodes_tiny(request) or request.session.shape.output == "latents":
            return 1
        return self.decoder.takes_streams(request.session.decoder_cache, request.work.latents)

    @torch.no_grad()
    def post_decode_together(
        self, batch: Sequence[DiffusionRequest[Session, Chunk]]
    ) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        assert self.decoder is not None
        before = [request.session.decoder_cache for request in batch]
        decoded = self.decoder.decode_together([request.work.latents.unsqueeze(0) for request in batch], before)
        results = []
        for request, (pixels, state) in zip(batch, decoded, strict=True):
            chunk = request.work
            chunk.decoded_from, chunk.decoder_cache = request.session.decoder_cache, state
            tensors = {"frames": to_uint8(pixels, self.rounding)} | chunk.latents_beside(request.session.shape)
            results.append((self.result_meta(request), tensors))
        return results

    # -- for `build` ---------------------------------------------------------------------------------------------------

    def _begin(self, setup: StreamingSetup[Any, Any, Any]) -> None:
        super()._begin(setup)
        assert isinstance(setup, WanChunkSetup)
        self.image_encoder, device = None, setup.options.text_encoder_device
        self.text_encoder = text_encoder_of(
            setup.parallel,
            setup.text_config,
            setup.layout.tokenizer,
            max_tokens=setup.config.text_len,
            device=device,
            dtype=setup.dtype,
            cuda_graphs=setup.text_graphs,
        )
        if setup.image_config and not setup.parallel.is_vae_stage:
            self.image_encoder = ImageEncoder(setup.image_config, device=device or "model", dtype=setup.dtype)

    def _add_components(
        self,
        setup: Setup,
        *,
        encodes: bool,
        frames_per_call: int | None = None,
        continuation: Literal["cache", "restart"] = "cache",
    ) -> None:
        """encodes: whether this rank has the VAE's encoder. frames_per_call: see `StreamingWanVAE`. continuation: see
        `ChunkDecoder`.
        """
        dtype, decodes = setup.options.vae_torch_dtype(setup.dtype), setup.parallel.decodes
        bands = RowBands.of(setup.parallel)
        self.vae = StreamingWanVAE(
            setup.vae_config,
            encoder=encodes,
            decoder=decodes and setup.options.decoder == "wan",
            dtype=dtype,
            compiled=setup.compiled,
            frames_per_call=frames_per_call,
            bands=bands,
            fuse=partial(fused_decoder, cuda_graphs=setup.cuda_graphs and bands is not None),
        )
        self._wants_tiny_vae = setup.wants_tiny_vae
        channels = setup.tiny_vae_channels  # read on every rank: each refuses a bad file
        self.tiny_vae = TinyVAEDecoder(channels, dtype=dtype) if decodes and channels is not None else None
        self.decoder = None
        if decodes and self.tiny_vae is not None and setup.options.decoder == "tiny":
            self.decoder = ChunkDecoder(self.tiny_vae)
        elif decodes:
            height, width = setup.config.latent_size(setup.omni.height, setup.omni.width)
            self.decoder = ChunkDecoder(
                self.vae, self.tiny_vae, continuation=continuation, largest_cells=height * width
            )
        self.prompts = SharedPrompts(self.transformer.cross_attention_kv)


if TYPE_CHECKING:

    def _keeps_the_contract(
        model: WanChunkModel[Shape, Session, Chunk, Setup, Layout],
    ) -> SupportsStepExecution[Session, Chunk]:
        return model
