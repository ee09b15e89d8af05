# SPDX-License-Identifier: Apache-2.0
"""Computes how much memory a streaming model needs per GPU. The computation uses only the model's
shapes and loads nothing.

All functions are pure. The sizes of weights, K/V windows and caches are exact. The transient memory
of a decode is a measured value (`AutoencoderMemory.workspace`). Tests: tests/planning/.
"""

from dataclasses import dataclass, replace
from typing import Final

from vllm_omni.model_executor.vllm_model import GRAPH_CHANNELS
from vllm_omni.planning.stream_model import BF16, ParallelSplit, StreamModel

GPU_BYTES: Final = {"H200": 150.1e9, "H100": 85.0e9}
"""Memory in bytes that the driver reports for each kind of GPU."""
_USABLE: Final = 0.95
"""Fraction of a GPU's memory that a server can use."""
_INT8: Final = 1
_WORKSPACE_FRAMES: Final = 3
"""Number of latent frames in the chunk that was used to measure `AutoencoderMemory.workspace`."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory use of one engine."""

    split: ParallelSplit
    """How the engine splits the model over GPUs."""
    session_bytes: float
    """Bytes per session on the rank where sessions are largest."""
    memory_bytes: float
    """Bytes used on the rank that uses the most, with the requested number of sessions."""
    max_sessions: int
    """Maximum number of sessions that fit; 0 if the model itself does not fit."""


@dataclass(frozen=True)
class _Rank:
    fixed: float
    """Bytes that the rank uses if there are no sessions."""
    session: float
    """Bytes that each session uses on the rank."""


def plan_memory(
    model: StreamModel, gpu_bytes: float, split: ParallelSplit, sessions: int = 1
) -> MemoryPlan:
    """Compute the memory use of an engine.

    Args:
        model: The model and its serving options.
        gpu_bytes: Memory of one GPU in bytes.
        split: How the engine splits the model over GPUs.
        sessions: Number of live sessions.
    """
    ranks = _fullest_ranks(model, split)
    most = min((_USABLE * gpu_bytes - rank.fixed) // rank.session for rank in ranks)
    return MemoryPlan(
        split=split,
        session_bytes=max(rank.session for rank in ranks),
        memory_bytes=max(rank.fixed + sessions * rank.session for rank in ranks),
        max_sessions=max(0, int(most)),
    )


def window_bytes(model: StreamModel, frames: int) -> float:
    """Return the size in bytes of the K/V for `frames` latent frames in all layers and heads."""
    elements = 2 * (model.kv_dim or model.dim) * model.layers + model.side_kv
    return float(model.kv_itemsize * frames * model.tokens_per_frame * elements)


def _pinned_bytes(model: StreamModel) -> float:
    """Return the size in bytes of the pinned tokens' K/V, including the second copy of the keys."""
    return 3.0 * model.kv_itemsize * model.pinned_tokens * model.dim * model.layers


def _cross_kv_bytes(model: StreamModel, split: ParallelSplit) -> float:
    """Return the size in bytes of the prompts' K/V. Each chunk in flight may have a different
    prompt.
    """
    elements = 2 * model.context_length * model.dim * model.layers / split.layer_parts
    return model.in_flight * elements * BF16 / (split.ranks if split.tensor else 1)


def session_bytes(model: StreamModel, split: ParallelSplit, *, last_stage: bool = True) -> float:
    """Return the size in bytes of one session on the first rank of a stage with layers.

    The last stage with layers also decodes, unless there is a VAE stage.
    """
    frames = (
        model.window
        + (model.sinks if model.moving_sinks else 0)
        + (model.in_flight - 1) * model.chunk
    )
    windows = model.denoise if model.noise_matched and not split.temporal else 1
    stored = windows * window_bytes(model, frames) + _pinned_bytes(model)
    window = stored / (split.ranks * split.layer_parts)
    decodes = last_stage and not split.vae_stage
    decoder = model.autoencoder.decoder_cache / split.decode_ranks if decodes else 0.0
    encoder = model.autoencoder.encoder_cache if model.image or model.video_input else 0.0
    caches = (decoder + encoder) * model.area
    return window + _cross_kv_bytes(model, split) + _modulation_bytes(model, split) + caches


def _modulation_bytes(model: StreamModel, split: ParallelSplit) -> float:
    """Return the size in bytes of the scales and shifts that all layers compute from the camera.
    These tensors are retained until the chunk is finished.
    """
    if not model.camera:
        return 0.0
    elements = (
        2 * model.chunk * model.tokens_per_frame * model.dim * model.layers / split.layer_parts
    )
    return elements * BF16 / (1 if split.tensor else split.ranks)


def _graph_bytes(model: StreamModel, split: ParallelSplit) -> float:
    """Return the size in bytes of the second copy of a chunk's modulation and prompt K/V, which
    CUDA graphs read. All sessions share this copy.

    On one GPU, the copy is counted only if graphs are requested, because the copy of a network that
    uses graphs without a request is small.
    """
    by_default = split.ranks > 1 and model.dim / split.ranks <= GRAPH_CHANNELS
    if not (model.cuda_graphs or by_default):
        return 0.0
    return _modulation_bytes(model, split) + _cross_kv_bytes(model, split) / model.in_flight


def weight_bytes(model: StreamModel, split: ParallelSplit, *, first_stage: bool = True) -> float:
    """Return the size in bytes of the weights on the first rank of a stage with layers.

    The first rank of the first stage also holds the text encoder.
    """
    shared = split.layer_parts * (split.ranks if split.tensor else 1)
    saved = model.block_parameters * (BF16 - model.weight_itemsize)
    if model.weight_itemsize < BF16:
        saved += model.camera_parameters * (BF16 - _INT8)
    has_encoder = (first_stage or model.context_everywhere) and not model.text_on_cpu
    context = model.context_weights if has_encoder else 0.0
    transformer = (model.parameters * BF16 - saved) / shared
    return transformer + _adapter_bytes(model, split) + model.autoencoder.weights + context


def _adapter_bytes(model: StreamModel, split: ParallelSplit) -> float:
    """Return the size in bytes of the LoRA adapter slots.

    Tensor-parallel ranks split one of an adapter's two factors; each rank has a full copy of the
    other factor.
    """
    whole = model.adapters * model.adapter_rank * model.sides * BF16 / split.layer_parts
    return whole * (1 + 1 / split.ranks) / 2 if split.tensor else whole


def _fullest_ranks(model: StreamModel, split: ParallelSplit) -> list[_Rank]:
    """Return the ranks that can use the most memory: the first rank of the first stage, of the last
    stage with layers and, if there is one, of the VAE stage.
    """
    # With several stages, the next chunk is decoded while a result waits for its engine step.
    decodes = 1 if split.stages == 1 else 2
    longer = max(1.0, model.chunk / _WORKSPACE_FRAMES)
    workspace = decodes * model.autoencoder.workspace
    if model.image or model.video_input:
        workspace = max(workspace, model.autoencoder.encoder_workspace)
    workspace *= longer * model.area
    if not model.image:  # ranks do not split the encoder of an image condition
        workspace /= split.decode_ranks
    found = []
    for first, last in (
        ((True, True),) if split.layer_stages == 1 else ((True, False), (False, True))
    ):
        transient = workspace if last and not split.vae_stage else 0.0
        weights = weight_bytes(model, split, first_stage=first)
        fixed = weights + _graph_bytes(model, split) + transient
        found.append(_Rank(fixed, session_bytes(model, split, last_stage=last)))
    if split.vae_stage:
        cache = model.autoencoder.decoder_cache * model.area / split.decode_ranks
        found.append(_Rank(model.autoencoder.weights + workspace, cache))
    return found


def splits(model: StreamModel, gpus: int) -> list[ParallelSplit]:
    """Return every split over at most `gpus` GPUs that the model's heads, layers and cache
    allow.
    """
    found = [ParallelSplit()]
    for ranks in range(1, gpus + 1):
        if model.heads % ranks:
            continue
        for stages in range(1, gpus // ranks + 1):
            if ranks * stages == 1 or stages > model.layers:
                continue
            tensors = (
                (False,) if ranks == 1 else (False, True) if model.sequence_parallel else (True,)
            )
            together = ranks > 1 and model.sequence_parallel
            for vae_stage in (False, True) if stages > 1 else (False,):
                found += [
                    ParallelSplit(ranks, stages, tensor, vae_stage, vae_parallel=together)
                    for tensor in tensors
                ]
                if model.noise_matched and 1 < stages - vae_stage == model.denoise:
                    found += [replace(split, temporal=True) for split in found[-len(tensors) :]]
    return found
