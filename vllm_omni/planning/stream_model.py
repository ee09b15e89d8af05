# SPDX-License-Identifier: Apache-2.0
"""A streaming model and a split over GPUs as `plan` sees them: sizes and counts; the formulas are in `cost.py`.

A family that can be planned describes its networks in `models/<name>/plan.py` (`FamilyPlan`). Imports nothing.
Held by tests/planning/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_TEXT_ROWS = 512
_LATENT_CELL = 8
_VAE_PIXELS = 480 * 832
_TEXT_WEIGHTS = 11.4e9
"""umt5-xxl, bf16."""
BF16 = 2
"""Bytes of a number."""


@dataclass(frozen=True)
class Autoencoder:
    """Costs of the autoencoder, at 480x832 unless the model's token grid is fixed; defaults: Wan's VAE, bf16.

    decode_tflop, decode_first_tflop: of one latent frame, a later one (4 pixel frames) and a stream's first (1).
    encode_tflop: of one latent frame's pixel frames. decoder_cache, encoder_cache: bytes a stream keeps. weights: in
    bytes. workspace: its largest transient, as a share of `Card.workspace_bytes`. launch: the host's time for a chunk's
    decode, as a share of `Card.decode_launch_s`.
    """

    decode_tflop: float = 13.55
    decode_first_tflop: float = 4.35
    encode_tflop: float = 8.05
    decoder_cache: float = 1801 * 2**20
    encoder_cache: float = 1070 * 2**20
    weights: float = 0.25e9
    workspace: float = 1.0
    launch: float = 1.0


@dataclass(frozen=True)
class StreamModel:
    """One model as it is served.

    parameters: of the transformer. window, sinks, chunk, first_chunk: latent frames. denoise: steps; clean: passes
    after them, 1 with the strict cache, 0 where each step keeps a window of its own (noise-matched). in_flight: chunks
    of one session at work at once. cuda_graphs: passes are launched as graphs. camera: has camera layers. image: has
    an image condition with an encoder stream. video_input: each chunk brings its video, encoded first. moving_sinks:
    sinks are kept twice. text_on_cpu: the encoder of its context is on the host. kv_itemsize: bytes of a stored key or
    value's number. side_flop: of a token's pass outside the trunk; side_kv: numbers kept of a token beside the trunk's
    keys and values. context_rows, context_weights: rows that cross-attention reads; bytes of their encoder's weights,
    which are on every rank with layers (context_everywhere) or on the first one alone.
    weight_itemsize: bytes of a number of the blocks' linear layers, its share of a scale included; of camera layers 1,
    if it is less than in bf16.
    adapters, adapter_rank: slots of LoRA adapters and their rank. sides: inputs and outputs of all matrices, added up.
    frames_per_latent: video frames of a latent frame. grid_tokens: of a latent frame, where the video's size does not
    change it. linears: parameters of the linear layers that a token passes. kv_dim: width of keys and of values. 0 of
    these three = by Wan's formulas. sequence_parallel: ranks may share tokens (Ulysses), and a decode.
    growing_graphs: the first of a session's passes is launched kernel by kernel. image_passes: of a session's first
    chunk, over the latent frame that its start image becomes.
    """

    name: str
    dim: int
    ffn_dim: int
    heads: int
    layers: int
    parameters: int
    window: int
    sinks: int
    height: int
    width: int
    chunk: int = 3
    first_chunk: int = 3
    denoise: int = 4
    clean: int = 1
    in_flight: int = 1
    cuda_graphs: bool = False
    camera: bool = False
    image: bool = False
    video_input: bool = False
    moving_sinks: bool = False
    text_on_cpu: bool = False
    kv_itemsize: int = BF16
    weight_itemsize: float = BF16
    side_flop: float = 0.0
    side_kv: int = 0
    context_rows: int = _TEXT_ROWS
    context_weights: float = _TEXT_WEIGHTS
    context_everywhere: bool = False
    adapters: int = 0
    adapter_rank: int = 0
    sides: int = 0
    frames_per_latent: int = 4
    grid_tokens: int = 0
    linears: int = 0
    kv_dim: int = 0
    autoencoder: Autoencoder = Autoencoder()
    sequence_parallel: bool = True
    growing_graphs: bool = False
    image_passes: int = 0

    @property
    def passes(self) -> int:
        return self.denoise + self.clean

    @property
    def tokens_per_frame(self) -> int:
        return self.grid_tokens or self.height // (2 * _LATENT_CELL) * (self.width // (2 * _LATENT_CELL))

    @property
    def frames_per_chunk(self) -> int:
        return self.frames_per_latent * self.chunk

    @property
    def block_parameters(self) -> int:
        """Of the linear layers of all blocks: those that quantization takes."""
        return self.linears or self.layers * (8 * self.dim**2 + 2 * self.dim * self.ffn_dim)

    @property
    def camera_parameters(self) -> int:
        """Of four square layers a block; quantization keeps them in int8."""
        return 4 * self.layers * self.dim**2 if self.camera else 0

    @property
    def area(self) -> float:
        """Of the frames that the autoencoder works on, relative to 480x832."""
        return 1.0 if self.grid_tokens else self.height * self.width / _VAE_PIXELS


Changes = Mapping[str, Any]
"""Fields of `StreamModel` that the user has chosen."""


@dataclass(frozen=True)
class FamilyPlan:
    """A family's networks, for `vllm-omni plan`.

    sizes: names of networks of different sizes, rows of `plan all`. releases: further names, those of `vllm-omni
    download`. named: (one of these names, changes) -> the network. of_checkpoint: (checkpoint directory, the family's
    part of its `hf_config`, changes) -> the network. Both raise ValueError for changes that the family cannot serve.
    """

    sizes: tuple[str, ...]
    named: Callable[[str, Changes], StreamModel]
    of_checkpoint: Callable[[str, Mapping[str, Any], Changes], StreamModel]
    releases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """ulysses x pipeline ranks; `tensor` means tensor parallelism in the place of Ulysses.

    vae_stage: the last stage holds no layer and decodes (`omni.vae_stage`). temporal: each stage holds all layers and
    one denoise step (`omni.pipeline` "temporal"). vae_parallel: the `ranks` of a stage also decode together
    (`omni.vae_parallel`), else the first of them alone. replicas: engines like this, with a part of the sessions each
    (data parallel).
    """

    ranks: int = 1
    stages: int = 1
    tensor: bool = False
    vae_stage: bool = False
    temporal: bool = False
    vae_parallel: bool = False
    replicas: int = 1

    @property
    def decode_ranks(self) -> int:
        return self.ranks if self.vae_parallel else 1

    @property
    def layer_stages(self) -> int:
        return self.stages - self.vae_stage

    @property
    def layer_parts(self) -> int:
        """Into how many parts stages cut the layers."""
        return 1 if self.temporal else self.layer_stages

    @property
    def gpus(self) -> int:
        return self.ranks * self.stages * self.replicas

    def __str__(self) -> str:
        if self.replicas > 1:
            return f"{self.replicas} x ({replace(self, replicas=1)})"
        parts = [f"{'TP' if self.tensor else 'Ulysses'} {self.ranks}"] if self.ranks > 1 else []
        kind = "temporal" if self.temporal else "PP"
        parts += [f"{kind} {self.layer_stages}"] if self.layer_stages > 1 else []
        return " x ".join(parts or ["1 GPU"]) + (" + VAE" if self.vae_stage else "")
