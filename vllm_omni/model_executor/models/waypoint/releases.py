# SPDX-License-Identifier: Apache-2.0
"""The configurations of the released Waypoint networks, keyed by their `vllm-omni download` names.

This module contains only tables. `hub.py` downloads the networks, `checkpoint.py` locates them, and
`plan.py` computes their memory requirements.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm_omni.model_executor.models.waypoint.config import WaypointConfig

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
"""Content of the `config.yaml` of Waypoint 1.5 at 1280x720."""
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
"""Height and width of the token grid, keyed by the name of the Waypoint 1.5 release."""


def released_config(name: str) -> WaypointConfig:
    """Return the configuration of a release. The names in `GRIDS` are releases of Waypoint 1.5. All
    other names refer to Waypoint-1.
    """
    if name not in GRIDS:
        return WaypointConfig.from_checkpoint(_WAYPOINT_1)
    height, width = GRIDS[name]
    return WaypointConfig.from_checkpoint({**WAYPOINT_1_5, "height": height, "width": width})
