# SPDX-License-Identifier: Apache-2.0
"""Waypoint as `plan` sees it: a fixed token grid, two kinds of K/V rings, autoencoders of its own.

FLOP and bytes are counted on modules without storage. Held by tests/planning/test_plan_waypoint.py.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from vllm_omni.model_executor.models.waypoint.autoencoders import make_codec
from vllm_omni.model_executor.models.waypoint.checkpoint import transformer_shapes
from vllm_omni.model_executor.models.waypoint.config import PROMPT_ROWS, WaypointConfig
from vllm_omni.model_executor.models.waypoint.state import FrameRings
from vllm_omni.planning.stream_model import Autoencoder, StreamModel

WAYPOINT_1_5: Final[Mapping[str, Any]] = {
    "model_type": "waypoint-1.5",
    "d_model": 2048,
    "n_layers": 24,
    "n_heads": 32,
    "n_kv_heads": 16,
    "mlp_ratio": 4,
    "channels": 32,
    "patch": [2, 2],
    "height": 16,
    "width": 32,
    "local_window": 16,
    "global_window": 128,
    "global_pinned_dilation": 8,
    "global_attn_period": 4,
    "global_attn_offset": -1,
    "value_residual": True,
    "noise_conditioning": "wan",
    "ctrl_conditioning": "mlp_fusion",
    "ctrl_conditioning_period": 3,
    "scheduler_sigmas": [1.0, 0.9, 0.75, 0.3, 0.0],
    "base_fps": 15,
    "inference_fps": 60,
    "temporal_compression": 4,
}
"""`config.yaml` of 1.5 at 1280x720."""
_WAYPOINT_1: Final[Mapping[str, Any]] = {
    "model_type": "waypoint-1",
    "d_model": 2560,
    "n_layers": 22,
    "n_heads": 40,
    "n_kv_heads": 20,
    "mlp_ratio": 5,
    "channels": 16,
    "patch": [2, 2],
    "height": 16,
    "width": 16,
    "local_window": 16,
    "global_window": 128,
    "global_pinned_dilation": 8,
    "global_attn_period": 4,
    "gated_attn": True,
    "noise_conditioning": "wan",
    "ctrl_conditioning": "mlp_fusion",
    "prompt_conditioning": "cross_attention",
    "prompt_embedding_dim": 2048,
    "base_fps": 60,
}
GRIDS: Final[Mapping[str, tuple[int, int]]] = {"waypoint": (16, 32), "waypoint_360p": (8, 16)}
"""Releases of 1.5: height and width of the token grid."""
RELEASES: Final = (*GRIDS, "waypoint_1_small", "waypoint_1_1_small")
"""Download names. The last two are one network."""
_TEXT_WEIGHTS = 7.6e9
"""umt5-xl's encoder, bf16."""
_WORKSPACE = 0.9e9 / 4.0e9
"""Of `Card.workspace_bytes`, at 512 tokens a frame: from the peak of the one measured run, less weights and session."""


def waypoint_config(name: str) -> WaypointConfig:
    """The config of one of `RELEASES`."""
    if name not in GRIDS:
        return WaypointConfig.from_checkpoint(_WAYPOINT_1)
    height, width = GRIDS[name]
    return WaypointConfig.from_checkpoint({**WAYPOINT_1_5, "height": height, "width": width})


def waypoint_model(
    name: str, config: WaypointConfig, changes: Mapping[str, Any], codec: Mapping[str, Any] | None = None
) -> StreamModel:
    """The model that `predict` takes. codec: the autoencoder's sizes where they are not the released ones.

    Raises ValueError for changes of fixed settings.
    """
    fixed = sorted({"window", "chunk", "first_chunk", "denoise", "clean", "in_flight", "video_input"} & set(changes))
    if fixed:
        raise ValueError(f"{name}: a Waypoint checkpoint fixes its windows, chunks and steps, and takes no video")
    shapes = transformer_shapes(config)
    read_prompts = sum(config.reads_prompt(layer) for layer in range(config.n_layers))
    tokens, kv_dim = config.tokens_per_frame, config.n_kv_heads * config.head_dim
    sizes: dict[str, Any] = {"num_heads": config.n_kv_heads, "dtype": torch.bfloat16, "device": "meta"}
    rings = FrameRings(config, range(config.n_layers), **sizes).nbytes
    each = 2 * kv_dim * config.n_layers  # numbers of a token
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
        first_chunk=1,
        denoise=len(config.scheduler_sigmas) - 1,
        image=True,
        grid_tokens=tokens,
        frames_per_latent=config.temporal_compression,
        sequence_parallel=False,
        growing_graphs=True,
        image_passes=1,
        context_rows=PROMPT_ROWS * read_prompts // config.n_layers,
        context_weights=_TEXT_WEIGHTS if config.prompted else 0.0,
        autoencoder=_autoencoder(config, codec) if codec else _released_autoencoder(config),
        **{"height": height, "width": width, **changes},
    )


def _passed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether every token passes this layer of a block: not those of controls and prompts, which are computed once."""
    return name.startswith("blocks.") and len(shape) == 2 and ".fc1_c." not in name and ".cross.k" not in name


@cache
def _released_autoencoder(config: WaypointConfig) -> Autoencoder:
    return _autoencoder(config, {})


def _autoencoder(config: WaypointConfig, codec: Mapping[str, Any]) -> Autoencoder:
    with torch.device("meta"):
        made = make_codec(config, codec, torch.bfloat16)
        channels, *cells = config.latent_shape
        latent, image = torch.empty(channels, 1, *cells), torch.empty(*config.codec_size, 3, dtype=torch.uint8)
    with torch.no_grad():
        with FlopCounterMode(display=False) as first:
            _, memory = made.decode_frames(latent, config.codec_size, None)
        with FlopCounterMode(display=False) as later:
            made.decode_frames(latent, config.codec_size, memory)
        with FlopCounterMode(display=False) as encoded:
            made.encode_image(image)
    return Autoencoder(
        decode_tflop=later.get_total_flops() / 1e12,
        decode_first_tflop=first.get_total_flops() / 1e12,
        encode_tflop=encoded.get_total_flops() / 1e12,
        decoder_cache=made.state_nbytes(0, 0),
        encoder_cache=0.0,
        weights=sum(weight.numel() * weight.element_size() for weight in made.parameters()),
        launch=0.0,
        workspace=_WORKSPACE * config.tokens_per_frame / 512,
    )
