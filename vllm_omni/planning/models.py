# SPDX-License-Identifier: Apache-2.0
"""The models `plan` knows by name, and how a checkpoint directory becomes one. Reads configs, no weights."""

import math
from pathlib import Path
from typing import Any, Final

from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions
from vllm_omni.model_executor.models.causal_wan.releases import RELEASES as CAUSAL_RELEASES
from vllm_omni.model_executor.models.causal_wan.releases import Release
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.weights import transformer_shapes as lingbot_shapes
from vllm_omni.model_executor.models.matrix_game.checkpoint import transformer_shapes as matrix_game_shapes
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig
from vllm_omni.model_executor.models.registry import detect_family
from vllm_omni.model_executor.models.wan.architecture import ChunkTransformerConfig
from vllm_omni.model_executor.models.wan.transformer_weights import transformer_shapes
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.planning.stream_model import StreamModel
from vllm_omni.planning.waypoint import RELEASES as WAYPOINTS
from vllm_omni.planning.waypoint import waypoint_config, waypoint_model

NAMES: Final = (
    *("lingbot_world", "lingbot_world_v2_1_3b", "causal_wan_1_3b", "causal_wan_14b", "matrix_game"),
    *("waypoint", "waypoint_360p", "waypoint_1_small"),
)
"""Networks of different sizes."""
_CAUSAL: Final = {release.download_name: release for release in CAUSAL_RELEASES}
RELEASED: Final = (*NAMES, *(name for name in (*_CAUSAL, *WAYPOINTS) if name not in NAMES))
"""Those, and others by the name that `vllm-omni download` takes; a directory of that name comes first."""
_LINGBOT_1_3B: dict[str, Any] = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30, "sink_frames": 6}
_CLIP_WEIGHTS = 1.26e9
"""ViT-H/14's vision tower but for its last layer, bf16."""
_WAN_14B: dict[str, Any] = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}


def model_of(name: str, **changes: Any) -> StreamModel:
    """A model by name (`RELEASED`) or checkpoint directory. changes: fields of `StreamModel`. Raises ValueError."""
    if name == "lingbot_world":
        return _lingbot(name, LingBotWorldConfig(), changes)
    if name == "lingbot_world_v2_1_3b":
        return _lingbot(name, LingBotWorldConfig(**_LINGBOT_1_3B), changes)
    if name == "causal_wan_1_3b":
        return _causal(name, CausalWanConfig(), changes)
    if name == "causal_wan_14b":
        return _causal(name, CausalWanConfig(**_WAN_14B), changes)
    if name == "matrix_game":
        return _matrix_game(name, MatrixGameConfig(), changes)
    if name in WAYPOINTS:
        return waypoint_model(name, waypoint_config(name), changes)
    path = Path(name)
    if name in _CAUSAL and not path.is_dir():
        return _causal_release(_CAUSAL[name], changes)
    if not path.is_dir():
        raise ValueError(f"{name} is neither a checkpoint directory nor one of {', '.join(RELEASED)}")
    family = detect_family(path)
    checkpoint = family.hf_config(path).get(family.name, {})
    values = checkpoint.get("transformer")
    if family.name == "lingbot_world":
        return _lingbot("lingbot_world", LingBotWorldConfig.from_checkpoint(values), changes)
    if family.name == "causal_wan":
        steps = {"denoise": len(CausalWanOptions.of(checkpoint, {}).denoising_steps)}  # a release may have its own
        return _causal(str(path), CausalWanConfig.from_checkpoint(values), steps | changes)
    if family.name == "matrix_game":
        return _matrix_game(str(path), MatrixGameConfig.from_checkpoint(values), changes)
    if family.name == "waypoint":
        return waypoint_model(str(path), WaypointConfig.from_checkpoint(values), changes, checkpoint["codec"])
    raise ValueError(f"{name} is a {family.name}; `plan` knows lingbot_world, causal_wan, matrix_game and waypoint")


def _lingbot(name: str, config: LingBotWorldConfig, changes: dict[str, Any]) -> StreamModel:
    _check_world("lingbot_world", changes)
    fields = {
        "window": config.window_frames or 18,
        "sinks": config.sink_frames or 9,
        "camera": True,
        "image": True,
        "text_on_cpu": True,
        **changes,
    }
    return StreamModel(name, **_sizes(config, lingbot_shapes(config)) | fields)


def _matrix_game(name: str, config: MatrixGameConfig, changes: dict[str, Any]) -> StreamModel:
    _check_world("matrix_game", changes)
    variant, dim, keys, mouse = config.variant, config.dim, config.keyboard_width, config.mouse_width
    action = 2 * dim * keys  # the keyboard's queries and its result
    if config.mouse_dim:
        action += mouse * (dim + config.action_rows * config.mouse_dim + 4 * mouse + dim)
    fields = {
        "window": config.window_frames or variant.window_frames,
        "sinks": 0,
        "denoise": len(variant.steps),
        "image": True,
        "side_flop": 2.0 * action * len(config.action_blocks),
        "side_kv": 2 * mouse * len(config.action_blocks) if config.mouse_dim else 0,
        "context_rows": config.text_len,
        "context_weights": _CLIP_WEIGHTS,
        "context_everywhere": True,
        **changes,
    }
    return StreamModel(name, **_sizes(config, matrix_game_shapes(config)) | fields)


def _check_world(name: str, changes: dict[str, Any]) -> None:
    if changes.get("in_flight", 1) > 1 or changes.get("clean", 1) == 0:
        raise ValueError(f"{name} has no noise-matched cache; causal Wan has")
    if changes.get("video_input"):
        raise ValueError(f"{name} takes no video; causal Wan does")


def _causal(name: str, config: CausalWanConfig, changes: dict[str, Any]) -> StreamModel:
    window, sinks = config.window_frames or 21, 3 if config.sink_frames is None else config.sink_frames
    fields = {"window": window, "sinks": sinks, "moving_sinks": True, **changes}
    return StreamModel(name, **_sizes(config, transformer_shapes(config)) | fields)


def _causal_release(release: Release, changes: dict[str, Any]) -> StreamModel:
    name = release.download_name
    config = CausalWanConfig.from_checkpoint({**(_WAN_14B if name.endswith("14b") else {}), **release.transformer})
    steps = len(CausalWanOptions.parse(release.options).denoising_steps)
    return _causal(name, config, {"denoise": steps} | changes)


def _sizes(config: ChunkTransformerConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    height, width = config.native_size
    return {
        "height": height,
        "width": width,
        "dim": config.dim,
        "ffn_dim": config.ffn_dim,
        "heads": config.num_heads,
        "layers": config.num_layers,
        "sides": sum(shape[0] + math.prod(shape[1:]) for shape in shapes.values() if len(shape) in (2, 5)),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
    }
