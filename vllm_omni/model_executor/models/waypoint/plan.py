# SPDX-License-Identifier: Apache-2.0
"""Waypoint's memory and compute requirements for `vllm-omni plan`.

The token grid is fixed, and there are two kinds of K/V ring buffers. Byte counts are taken from a
network built on the meta device. The network code is imported only when a plan is computed.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from vllm_omni.model_executor.models.waypoint.checkpoint import transformer_shapes
from vllm_omni.model_executor.models.waypoint.config import PROMPT_ROWS, WaypointConfig
from vllm_omni.model_executor.models.waypoint.releases import GRIDS, released_config
from vllm_omni.planning.stream_model import AutoencoderMemory, Changes, FamilyPlan, StreamModel

_TEXT_WEIGHTS = 7.6e9
"""Size in bytes of umt5-xl's encoder in bf16."""
_WORKSPACE = 0.9e9
"""Working memory in bytes for a decode at 512 tokens per frame: the measured peak minus the weights
and the session."""


def _named(name: str, changes: Changes) -> StreamModel:
    return _stream_model(name, released_config(name), changes)


def _of_checkpoint(directory: str, checkpoint: Mapping[str, Any], changes: Changes) -> StreamModel:
    config = WaypointConfig.from_checkpoint(checkpoint["transformer"])
    return _stream_model(directory, config, changes, checkpoint["codec"])


def _stream_model(
    name: str, config: WaypointConfig, changes: Changes, codec: Mapping[str, Any] | None = None
) -> StreamModel:
    """Return the description of a network for `vllm-omni plan`. `codec` overrides the released
    sizes of the autoencoder.
    """
    from vllm_omni.model_executor.models.waypoint.state import FrameRings

    fixed = sorted(
        {"window", "chunk", "denoise", "noise_matched", "in_flight", "video_input"} & set(changes)
    )
    if fixed:
        raise ValueError(
            f"{name}: windows, chunks and steps of a Waypoint checkpoint are fixed; it accepts no "
            "input video"
        )
    shapes = transformer_shapes(config)
    read_prompts = sum(config.reads_prompt(layer) for layer in range(config.n_layers))
    tokens, kv_dim = config.tokens_per_frame, config.n_kv_heads * config.head_dim
    sizes: dict[str, Any] = {
        "num_heads": config.n_kv_heads,
        "dtype": torch.bfloat16,
        "device": "meta",
    }
    rings = FrameRings(config, range(config.n_layers), **sizes).nbytes
    each = 2 * kv_dim * config.n_layers  # elements per token
    window = config.local_window
    spare = rings / (torch.bfloat16.itemsize * tokens) - window * each
    height, width = (720, 1280) if config.codec_size == (512, 1024) else (360, 640)
    return StreamModel(
        name,
        dim=config.d_model,
        ffn_dim=config.mlp_dim,
        heads=config.n_kv_heads,
        layers=config.n_layers,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        sides=sum(sum(shape) for shape in shapes.values() if len(shape) == 2),
        linears=sum(math.prod(shape) for name, shape in shapes.items() if _passed(name, shape)),
        kv_dim=kv_dim,
        side_kv=math.ceil(spare / window),
        window=window,
        sinks=0,
        chunk=1,
        denoise=len(config.scheduler_sigmas) - 1,
        image=True,
        grid_tokens=tokens,
        frames_per_latent=config.temporal_compression,
        sequence_parallel=False,
        context_length=PROMPT_ROWS * read_prompts // config.n_layers,
        context_weights=_TEXT_WEIGHTS if config.prompted else 0.0,
        autoencoder=_autoencoder(config, codec) if codec else _released_autoencoder(config),
        **{"height": height, "width": width, **changes},
    )


def _passed(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether every token passes through this linear layer. Layers for controls and prompts
    do not, because they run only once per frame or prompt.
    """
    return (
        name.startswith("blocks.")
        and len(shape) == 2
        and ".fc1_c." not in name
        and ".cross.k" not in name
    )


@cache
def _released_autoencoder(config: WaypointConfig) -> AutoencoderMemory:
    return _autoencoder(config, {})


def _autoencoder(config: WaypointConfig, codec: Mapping[str, Any]) -> AutoencoderMemory:
    from vllm_omni.model_executor.models.waypoint.autoencoders import make_codec

    with torch.device("meta"):
        made = make_codec(config, codec, torch.bfloat16)
    return AutoencoderMemory(
        decoder_cache=made.state_nbytes(0, 0),
        encoder_cache=0.0,
        weights=sum(weight.numel() * weight.element_size() for weight in made.parameters()),
        workspace=_WORKSPACE * config.tokens_per_frame / 512,
        encoder_workspace=0.0,
    )


PLAN = FamilyPlan(
    sizes=(*GRIDS, "waypoint_1_small"),
    releases=("waypoint_1_1_small",),  # the same network as the last entry of `sizes`
    named=_named,
    of_checkpoint=_of_checkpoint,
)
