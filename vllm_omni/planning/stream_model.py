# SPDX-License-Identifier: Apache-2.0
"""Description of a streaming model and of its split over GPUs, from which `memory.py` computes the
memory use.

A family that `vllm-omni plan` supports describes its networks in `models/<name>/plan.py`
(`FamilyPlan`). Tests: tests/planning/.
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
"""Bytes of the weights of umt5-xxl in bf16."""


@dataclass(frozen=True)
class AutoencoderMemory:
    """Memory that the autoencoder uses at 480x832, or at the model's fixed token grid.

    The defaults are those of Wan 2.1's VAE in bf16.
    """

    decoder_cache: float = 1801 * 2**20
    """Bytes that the decoder caches per session."""
    encoder_cache: float = 1070 * 2**20
    """Bytes that the encoder caches per session in models with an image condition or video input.
    """
    weights: float = 0.25e9
    """Bytes of the autoencoder's weights."""
    workspace: float = 4.0e9
    """Bytes of transient memory for decoding one chunk of at most three latent frames.

    The value was measured on one H200 as peak memory minus persistent memory. Longer chunks need
    proportionally more.
    """
    encoder_workspace: float = 3.5e9
    """Bytes of transient memory for encoding, for a chunk of at most three latent frames.

    The value matters for models with an image condition or video input whose decoder needs less
    transient memory.
    """
    tiny: "AutoencoderMemory | None" = None
    """Memory of the autoencoder with the tiny decoder (`omni.model.decoder` `tiny`). If None,
    `TINY_DECODER` is used."""


TINY_DECODER: Final = AutoencoderMemory(decoder_cache=64 * 2**20, workspace=1.3e9)
"""Memory of Wan 2.1's VAE with the tiny decoder, measured as in `AutoencoderMemory`."""
WAN_2_2_AUTOENCODER: Final = AutoencoderMemory(
    decoder_cache=1359 * 2**20,
    encoder_cache=448 * 2**20,
    weights=1.41e9,
    workspace=4.0e9,
    tiny=AutoencoderMemory(
        decoder_cache=16 * 2**20, encoder_cache=448 * 2**20, weights=0.32e9, workspace=1.3e9
    ),
)
"""Memory of Wan 2.2's VAE in bf16. Caches and weights are exact. The workspaces are those of Wan
2.1; with them, the computed memory of the 5B worlds is at most 5 percent above the measured memory.
"""


@dataclass(frozen=True)
class StreamModel:
    """Sizes of one model, and the options with which it is served.

    If `linears` or `kv_dim` is 0, the value is computed with Wan's formula. If `grid_tokens` is 0,
    the number of tokens follows from the size of the video.
    """

    name: str
    """Name or checkpoint directory that the user gave."""
    dim: int
    """Width of the transformer."""
    ffn_dim: int
    """Width of the feed-forward layers."""
    heads: int
    """Number of attention heads. Ulysses and tensor parallelism split the heads."""
    layers: int
    """Number of transformer blocks. Pipeline stages split the blocks."""
    parameters: int
    """Number of parameters of the transformer."""
    window: int
    """Number of latent frames in the K/V window."""
    sinks: int
    """Number of sink frames at the start of the window."""
    height: int
    """Height of the video in pixels."""
    width: int
    """Width of the video in pixels."""
    chunk: int = 3
    """Number of latent frames per chunk."""
    denoise: int = 4
    """Number of denoise steps per chunk."""
    noise_matched: bool = False
    """Whether each denoise step has its own K/V window (`omni.model.cache` "noise_matched")."""
    in_flight: int = 1
    """Maximum number of chunks of one session in flight. More than one requires `noise_matched`."""
    camera: bool = False
    """Whether each transformer block has four camera layers."""
    image: bool = False
    """Whether sessions start from an image, which requires an encoder cache."""
    video_input: bool = False
    """Whether each chunk includes a video, which requires an encoder cache."""
    moving_sinks: bool = False
    """Whether sink frames are stored twice."""
    text_on_cpu: bool = False
    """Whether the text encoder is in host memory."""
    kv_itemsize: int = BF16
    """Bytes of one stored element of a key or value."""
    weight_itemsize: float = BF16
    """Bytes per weight in the linear layers of a block, including its share of the scales.

    If this is less than bf16, camera layers are stored in int8.
    """
    side_kv: int = 0
    """Number of K/V elements per token in addition to those of the transformer blocks, for example
    in action modules.
    """
    context_length: int = _TEXT_LENGTH
    """Number of tokens that cross-attention reads."""
    context_weights: float = _TEXT_WEIGHTS
    """Bytes of the weights of the text or image encoder."""
    context_everywhere: bool = False
    """Whether every rank with layers holds the text or image encoder. Default: only the first rank.
    """
    adapters: int = 0
    """Number of slots for LoRA adapters."""
    adapter_rank: int = 0
    """Largest rank of a LoRA adapter."""
    sides: int = 0
    """Sum of the input and output widths of all weight matrices, which determines the size of
    adapters."""
    frames_per_latent: int = 4
    """Number of video frames per latent frame."""
    latent_cell: int = 8
    """Number of pixels per latent cell along each side."""
    pinned_tokens: int = 0
    """Number of tokens outside the window that every chunk attends to, for example the tokens of
    reference images. The keys of these tokens are stored twice."""
    grid_tokens: int = 0
    """Number of tokens per latent frame if it does not depend on the size of the video; otherwise
    0.
    """
    linears: int = 0
    """Number of parameters in the linear layers of all blocks, or 0 to compute it from the widths.
    """
    kv_dim: int = 0
    """Width of keys and of values, or 0 for the width of the transformer."""
    autoencoder: AutoencoderMemory = AutoencoderMemory()
    """Memory of the autoencoder."""
    sequence_parallel: bool = True
    """Whether ranks can split the tokens of a chunk (Ulysses) and the decode of a frame."""
    preset: PresetName = DEFAULT_PRESET
    """Preset from which the options in this class are taken."""
    presets: tuple[PresetName, ...] = ()
    """Presets that the model's family offers."""

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
        """Number of parameters of the camera layers: four square matrices per block."""
        return 4 * self.layers * self.dim**2 if self.camera else 0

    @property
    def area(self) -> float:
        """Area of a frame in the autoencoder, relative to 480x832."""
        return 1.0 if self.grid_tokens else self.height * self.width / _VAE_PIXELS


Changes = Mapping[str, Any]
"""Fields of `StreamModel` that the user has chosen."""


@dataclass(frozen=True)
class FamilyPlan:
    """Networks of a model family, for `vllm-omni plan`.

    `named` and `of_checkpoint` raise ValueError for unsupported changes.
    """

    sizes: tuple[str, ...]
    """Names of networks of different sizes. `plan all` shows one row for each network."""
    named: Callable[[str, Changes], StreamModel]
    """Function that returns the network for a name in `sizes` or `releases`, with the user's
    changes."""
    of_checkpoint: Callable[[str, Mapping[str, Any], Changes], StreamModel]
    """Function that returns the network of a checkpoint. Its arguments are the checkpoint
    directory, the family's section of `hf_config`, and the user's changes."""
    releases: tuple[str, ...] = ()
    """Names of releases, which `vllm-omni download` also accepts."""


@dataclass(frozen=True)
class ParallelSplit:
    """How one engine splits a model over GPUs."""

    ranks: int = 1
    """Number of ranks that share layers, through Ulysses or tensor parallelism."""
    stages: int = 1
    """Number of pipeline stages."""
    tensor: bool = False
    """Whether ranks that share layers are tensor-parallel. If false, they use Ulysses."""
    vae_stage: bool = False
    """Whether the last stage has no layers and only decodes (`omni.vae_stage`)."""
    temporal: bool = False
    """Whether each stage has all layers and one denoise step (`omni.pipeline` "temporal")."""
    vae_parallel: bool = False
    """Whether the ranks of a stage split the decode of a frame (`omni.vae_parallel`)."""

    @property
    def decode_ranks(self) -> int:
        return self.ranks if self.vae_parallel else 1

    @property
    def layer_stages(self) -> int:
        return self.stages - self.vae_stage

    @property
    def layer_parts(self) -> int:
        """Number of pipeline stages over which the layers are split."""
        return 1 if self.temporal else self.layer_stages

    @property
    def gpus(self) -> int:
        return self.ranks * self.stages

    def __str__(self) -> str:
        parts = [f"{'TP' if self.tensor else 'Ulysses'} {self.ranks}"] if self.ranks > 1 else []
        kind = "temporal" if self.temporal else "PP"
        parts += [f"{kind} {self.layer_stages}"] if self.layer_stages > 1 else []
        return " x ".join(parts or ["1 GPU"]) + (" + VAE" if self.vae_stage else "")
