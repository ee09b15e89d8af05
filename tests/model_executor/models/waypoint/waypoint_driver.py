# SPDX-License-Identifier: Apache-2.0
"""Drives a `Waypoint` frame by frame in this process, as the runner does, without an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.chunks import run_request, run_stages

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.waypoint.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.waypoint.pipeline import Waypoint, WaypointSetup
from vllm_omni.model_executor.models.waypoint.state import WaypointChunk, WaypointSession

HEIGHT, WIDTH = 40, 64
Request = DiffusionRequest[WaypointSession, WaypointChunk]


def load_world(
    checkpoint: Path,
    parallel: ParallelContext | None = None,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> Waypoint:
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model=options)
    layout, values = find_layout(checkpoint), hf_config(checkpoint)["waypoint"]
    setup = WaypointSetup.of_checkpoint(
        values, layout, omni, torch.float32, parallel or ParallelContext(), kv_dtype=kv_dtype
    )
    world = Waypoint(setup)
    world.load_checkpoint(layout)
    return world


def start_image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (30, 50, 3), dtype=torch.uint8, generator=generator)


def open_session(world: Waypoint, session_id: str = "a", **params: Any) -> WaypointSession:
    return world.new_session(DiffusionParams(session_id=session_id, **params))


def make_request(
    session: WaypointSession, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> Request:
    return DiffusionRequest(
        "request",
        DiffusionParams(session_id=session.session_id, **params),
        dict(tensors or {}),
        session,
    )


def run_chunk(
    world: Waypoint,
    session: WaypointSession,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> torch.Tensor:
    """Frames, or latents, of the session's next chunk."""
    _, result = run_request(world, make_request(session, tensors, **params))
    return next(iter(result.values())).clone()


def latents_of(stages: Sequence[Waypoint], chunks: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Latents of a session, over pipeline stages that each have a session.

    chunks: arguments of `make_request` per chunk.
    """
    sessions = [open_session(world, output="latents") for world in stages]
    latents = []
    for chunk in chunks:
        requests = [make_request(each, output="latents", **chunk) for each in sessions]
        latents.append(run_stages(stages, requests)[1]["latents"].clone())
    return torch.cat(latents, dim=1)
