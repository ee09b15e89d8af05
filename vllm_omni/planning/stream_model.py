# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a streaming model and its split over GPUs. `memory.py` computes the memory use
from these descriptions.

A family that `vllm-omni plan` supports describes its networks in `models/<name>/plan.py`
(`FamilyPlan`). Tests: tests/planning/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_omni.model_executor.presets import DEFAULT_PRESET, PresetName

BF16 = 2
"""Size in bytes of one bf16 value."""
_VAE_PIXELS = 480 * 832
_TEXT_LENGTH = 512
_TEXT_WEIGHTS = 11.4e9
"""Size in bytes of umt5-xxl's weights in bf16."""


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
    """Size in bytes of the autoencoder's weights."""
    workspace: float = 4.0e9
    """Bytes of transient memory for decoding one chunk of at most three latent frames.

    The value was measured on one H200 as peak memory minus persistent memory. Longer chunks need
    proportionally more.
    """
    encoder_workspace: float = 3.5e9
    """Bytes of transient memory for encoding one chunk of at most three latent frames.

    The value matters only for models that have an image condition or video input and whose decoder
    needs less transient memory than this.
    """
    tiny: "AutoencoderMemory | None" = None
    """Memory of the autoencoder with the tiny decoder (`omni.model.decoder` is `tiny`). If None,
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
    """Sizes of one model, and its serving options.

    If `linears` or `kv_dim` is 0, the value is computed with Wan's formula. If `grid_tokens` is 0,
    the number of tokens follows from the video size.
    """

    name: str
    """Name or checkpoint directory that the user passed."""
    dim: int
    """Width of the transformer."""
    ffn_dim: int
    """Width of the feed-forward layers."""
    heads: int
    """Number of attention heads. Ulysses and tensor parallelism split the heads."""
    layers: int
    """Number of transformer blocks. Pipeline stages split the blocks."""
    parameters: int
    """Number of parameters in the transformer."""
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
    """Whether each denoise step has its own K/V window (`omni.model.cache` is "noise_matched")."""
    in_flight: int = 1
    """Maximum number of chunks of one session in flight. More than one requires `noise_matched`."""
    camera: bool = False
    """Whether each transformer block has four camera layers."""
    cuda_graphs: bool = False
    """Whether CUDA graphs are requested (`omni.model.cuda_graphs`)."""
    image: bool = False
    """Whether sessions start from an image, which requires an encoder cache."""
    video_input: bool = False
    """Whether each chunk includes a video, which requires an encoder cache."""
    moving_sinks: bool = False
    """Whether sink frames are stored twice."""
    text_on_cpu: bool = False
    """Whether the text encoder is in host memory."""
    kv_itemsize: int = BF16
    """Bytes per stored element of a key or value."""
    weight_itemsize: float = BF16
    """Bytes per weight in the linear layers of a block, including its share of the scales.

    If this number is less than that of bf16, camera layers are stored in int8.
    """
    side_kv: int = 0
    """Number of K/V elements per token in addition to those of the transformer blocks, for example
    in action modules.
    """
    context_length: int = _TEXT_LENGTH
    """Number of tokens that cross-attention reads."""
    context_weights: float = _TEXT_WEIGHTS
    """Size in bytes of the text or image encoder's weights."""
    context_everywhere: bool = False
    """Whether every rank that has layers holds the text or image encoder. Default: only the first
    rank holds it.
    """
    adapters: int = 0
    """Number of slots for LoRA adapters."""
    adapter_rank: int = 0
    """Largest rank of a LoRA adapter."""
    sides: int = 0
    """Sum of the input and output widths of all weight matrices. The sum determines the size of an
    adapter.
    """
    frames_per_latent: int = 4
    """Number of video frames per latent frame."""
    latent_cell: int = 8
    """Number of pixels per latent cell along each side."""
    pinned_tokens: int = 0
    """Number of tokens outside the window that every chunk attends to, for example the tokens of
    reference images. The keys of these tokens are stored twice."""
    grid_tokens: int = 0
    """Number of tokens per latent frame if this number does not depend on the video size; otherwise
    0.
    """
    linears: int = 0
    """Number of parameters in the linear layers of all blocks, or 0 to compute the number from the
    widths.
    """
    kv_dim: int = 0
    """Width of keys and of values, or 0 for the width of the transformer."""
    autoencoder: AutoencoderMemory = AutoencoderMemory()
    """Memory of the autoencoder."""
    sequence_parallel: bool = True
    """Whether ranks can split the tokens of a chunk (Ulysses) and the decode of a frame."""
    preset: PresetName = DEFAULT_PRESET
    """Preset that the options in this class are taken from."""
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
        """Number of quantized parameters: those in the linear layers of all blocks."""
        return self.linears or self.layers * (8 * self.dim**2 + 2 * self.dim * self.ffn_dim)

    @property
    def camera_parameters(self) -> int:
        """Number of parameters in the camera layers: four square matrices per block."""
        return 4 * self.layers * self.dim**2 if self.camera else 0

    @property
    def area(self) -> float:
        """Number of pixels in a frame relative to 480x832, or 1 for a model with a fixed token
        grid.
        """
        return 1.0 if self.grid_tokens else self.height * self.width / _VAE_PIXELS


Changes = Mapping[str, Any]
"""Fields of `StreamModel` that the user has chosen."""


@dataclass(frozen=True)
class FamilyPlan:
    """Networks of a model family, for `vllm-omni plan`.

    `named` and `of_checkpoint` raise ValueError for unsupported changes.
    """

    sizes: tuple[str, ...]
    """Names of the family's networks of different sizes. `plan all` shows one row for each network.
    """
    named: Callable[[str, Changes], StreamModel]
    """Function that returns the network for a name in `sizes` or `releases`, with the user's
    changes."""
    of_checkpoint: Callable[[str, Mapping[str, Any], Changes], StreamModel]
    """Function that returns the network for a checkpoint. Its arguments are the checkpoint
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
    """Whether each stage holds all layers and runs one denoise step (`omni.pipeline` is
    "temporal").
    """
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
        """Number of pipeline stages that the layers are split across."""
        return 1 if self.temporal else self.layer_stages

    @property
    def gpus(self) -> int:
        return self.ranks * self.stages

    def __str__(self) -> str:
        parts = [f"{'TP' if self.tensor else 'Ulysses'} {self.ranks}"] if self.ranks > 1 else []
        kind = "temporal" if self.temporal else "PP"
        parts += [f"{kind} {self.layer_stages}"] if self.layer_stages > 1 else []
        return " x ".join(parts or ["1 GPU"]) + (" + VAE" if self.vae_stage else "")
