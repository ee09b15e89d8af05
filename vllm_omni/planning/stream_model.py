# SPDX-License-Identifier: Apache-2.0
"""A streaming model and its split over GPUs, as used by `plan`. `memory.py` computes with them.

A family that can be planned describes its networks in `models/<name>/plan.py` (`FamilyPlan`).
Held by tests/planning/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_omni.model_executor.presets import DEFAULT_PRESET, PresetName

BF16 = 2
"""Bytes of one bf16 value."""
_VAE_PIXELS = 480 * 832
_TEXT_LENGTH = 512
_TEXT_WEIGHTS = 11.4e9
"""umt5-xxl, bf16."""


@dataclass(frozen=True)
class AutoencoderMemory:
    """Memory of the autoencoder at 480x832, or at the model's fixed token grid.

    Defaults: Wan 2.1's VAE, bf16.
    """

    decoder_cache: float = 1801 * 2**20
    """Bytes that the decoder caches per session."""
    encoder_cache: float = 1070 * 2**20
    """Bytes that the encoder caches per session, of models with an image condition or video
    input.
    """
    weights: float = 0.25e9
    """Bytes of its weights."""
    workspace: float = 4.0e9
    """Bytes of its largest transient: the decode of one chunk of at most three latent frames.

    Measured on one H200: peak memory minus persistent memory. Longer chunks need proportionally
    more.
    """
    encoder_workspace: float = 3.5e9
    """Bytes of the largest transient of its encoder, in the same unit.

    It is used for models with an image condition or video input whose decoder needs less.
    """
    tiny: "AutoencoderMemory | None" = None
    """Memory with the tiny decoder (`omni.model.decoder` `tiny`). None: `TINY_DECODER`."""


TINY_DECODER: Final = AutoencoderMemory(decoder_cache=64 * 2**20, workspace=1.3e9)
"""Wan 2.1's VAE with the tiny decoder, measured in the same way."""
WAN_2_2_AUTOENCODER: Final = AutoencoderMemory(
    decoder_cache=1359 * 2**20,
    encoder_cache=448 * 2**20,
    weights=1.41e9,
    workspace=4.0e9,
    tiny=AutoencoderMemory(
        decoder_cache=16 * 2**20, encoder_cache=448 * 2**20, weights=0.32e9, workspace=1.3e9
    ),
)
"""Wan 2.2's VAE, bf16. Caches and weights are exact. Workspaces are those of Wan 2.1; with
them, the computed memory of the 5B worlds is at most 5 percent above the measured one."""


@dataclass(frozen=True)
class StreamModel:
    """Sizes of one model, and the options with which it is served.

    Fields documented as 0 by default are then computed with Wan's formulas.
    """

    name: str
    """Name or directory that the user gave."""
    dim: int
    """Width of the transformer."""
    ffn_dim: int
    """Width of the feed-forward layers."""
    heads: int
    """Attention heads; Ulysses and tensor parallelism split them."""
    layers: int
    """Transformer blocks; pipeline stages split them."""
    parameters: int
    """Parameters of the transformer."""
    window: int
    """Latent frames in the K/V window."""
    sinks: int
    """Sink frames at the start of the window."""
    height: int
    """Height of the video in pixels."""
    width: int
    """Width of the video in pixels."""
    chunk: int = 3
    """Latent frames per chunk."""
    denoise: int = 4
    """Denoise steps per chunk."""
    noise_matched: bool = False
    """Whether each denoise step has a K/V window (`omni.model.cache` "noise_matched")."""
    in_flight: int = 1
    """Chunks of one session in flight; more than one requires `noise_matched`."""
    camera: bool = False
    """Whether each block has four camera layers."""
    image: bool = False
    """Whether sessions start from an image, which requires an encoder cache."""
    video_input: bool = False
    """Whether each chunk includes a video, which requires an encoder cache."""
    moving_sinks: bool = False
    """Whether sink frames are stored twice."""
    text_on_cpu: bool = False
    """Whether the text encoder is in host memory."""
    kv_itemsize: int = BF16
    """Bytes of one stored key or value element."""
    weight_itemsize: float = BF16
    """Bytes of one weight of a block's linear layers and its scale.

    Camera layers are int8 below bf16.
    """
    side_kv: int = 0
    """K/V elements per token in addition to those of the transformer blocks, for example of
    action modules.
    """
    context_length: int = _TEXT_LENGTH
    """Tokens that cross-attention reads."""
    context_weights: float = _TEXT_WEIGHTS
    """Bytes of the weights of the text or image encoder."""
    context_everywhere: bool = False
    """Whether every rank with layers holds that encoder. Default: the first rank only."""
    adapters: int = 0
    """Slots of LoRA adapters."""
    adapter_rank: int = 0
    """Largest rank of a LoRA adapter."""
    sides: int = 0
    """Sum of the input and output widths of all matrices, for the size of adapters."""
    frames_per_latent: int = 4
    """Video frames per latent frame."""
    latent_cell: int = 8
    """Pixels per latent cell along each side."""
    pinned_tokens: int = 0
    """Tokens outside the window that every chunk attends to, for example of reference images. Their
    keys are stored twice."""
    grid_tokens: int = 0
    """Number of tokens per latent frame if it does not depend on the size of the video; 0 by
    default.
    """
    linears: int = 0
    """Parameters of the blocks' linear layers; 0 by default."""
    kv_dim: int = 0
    """Width of keys and of values; 0 by default."""
    autoencoder: AutoencoderMemory = AutoencoderMemory()
    """Memory of the autoencoder."""
    sequence_parallel: bool = True
    """Whether ranks can share the tokens of a chunk (Ulysses) and a decode."""
    preset: PresetName = DEFAULT_PRESET
    """Preset from which the options above are taken."""
    presets: tuple[PresetName, ...] = ()
    """Presets of the model's family."""

    @property
    def tokens_per_frame(self) -> int:
        return self.grid_tokens or self.height // (2 * self.latent_cell) * (
            self.width // (2 * self.latent_cell)
        )

    @property
    def frames_per_chunk(self) -> int:
        return self.frames_per_latent * self.chunk

    @property
    def block_parameters(self) -> int:
        """Number of parameters that are quantized: the linear layers of all blocks."""
        return self.linears or self.layers * (8 * self.dim**2 + 2 * self.dim * self.ffn_dim)

    @property
    def camera_parameters(self) -> int:
        """Parameters of the camera layers: four square layers per block."""
        return 4 * self.layers * self.dim**2 if self.camera else 0

    @property
    def area(self) -> float:
        """Frame area in the autoencoder, relative to 480x832."""
        return 1.0 if self.grid_tokens else self.height * self.width / _VAE_PIXELS


Changes = Mapping[str, Any]
"""Fields of `StreamModel` that the user has chosen."""


@dataclass(frozen=True)
class FamilyPlan:
    """Networks of a model family, for `vllm-omni plan`.

    Both functions raise ValueError for unsupported changes.
    """

    sizes: tuple[str, ...]
    """Names of networks of different sizes; rows of `plan all`."""
    named: Callable[[str, Changes], StreamModel]
    """(a name of `sizes` or `releases`, changes) -> the network."""
    of_checkpoint: Callable[[str, Mapping[str, Any], Changes], StreamModel]
    """(checkpoint directory, the family's part of its `hf_config`, changes) -> the network."""
    releases: tuple[str, ...] = ()
    """Additional names that `vllm-omni download` accepts."""


@dataclass(frozen=True)
class ParallelSplit:
    """How one engine splits a model over GPUs."""

    ranks: int = 1
    """Ranks that share layers: Ulysses, or tensor parallelism."""
    stages: int = 1
    """Pipeline stages."""
    tensor: bool = False
    """Whether `ranks` are tensor parallel ranks."""
    vae_stage: bool = False
    """Whether the last stage has no layers and decodes (`omni.vae_stage`)."""
    temporal: bool = False
    """Whether each stage has all layers and one denoise step (`omni.pipeline` "temporal")."""
    vae_parallel: bool = False
    """Whether the ranks of a stage share a decode (`omni.vae_parallel`)."""

    @property
    def decode_ranks(self) -> int:
        return self.ranks if self.vae_parallel else 1

    @property
    def layer_stages(self) -> int:
        return self.stages - self.vae_stage

    @property
    def layer_parts(self) -> int:
        """Number of parts into which stages split the layers."""
        return 1 if self.temporal else self.layer_stages

    @property
    def gpus(self) -> int:
        return self.ranks * self.stages

    def __str__(self) -> str:
        parts = [f"{'TP' if self.tensor else 'Ulysses'} {self.ranks}"] if self.ranks > 1 else []
        kind = "temporal" if self.temporal else "PP"
        parts += [f"{kind} {self.layer_stages}"] if self.layer_stages > 1 else []
        return " x ".join(parts or ["1 GPU"]) + (" + VAE" if self.vae_stage else "")
