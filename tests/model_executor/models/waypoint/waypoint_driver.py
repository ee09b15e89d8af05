# SPDX-License-Identifier: Apache-2.0
"""Drives a `Waypoint` frame by frame in this process, as the runner does, without an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.waypoint.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.waypoint.pipeline import Waypoint, WaypointSetup
from vllm_omni.model_executor.models.waypoint.state import WaypointChunk, WaypointSession

HEIGHT, WIDTH = 40, 64
Request = DiffusionRequest[WaypointSession, WaypointChunk]
Result = tuple[dict[str, Any], dict[str, torch.Tensor]]


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


def step(stages: Sequence[Waypoint], batches: Sequence[Sequence[Request]]) -> None:
    """One denoise step of requests that may be at different steps, through every pipeline stage."""
    hidden = None
    for world, batch in zip(stages, batches, strict=True):
        hidden = world.denoise_step(batch, hidden)
    assert hidden is not None
    stages[-1].step_scheduler(batches[-1], hidden)
    for batch in batches:
        for request, last in zip(batch, batches[-1], strict=True):
            stages[0].set_latents(request, stages[-1].latents(last))
            request.step += 1


def finish(world: Waypoint, request: Request) -> Result:
    result = world.post_decode(request)
    world.commit(request)
    return result


def run_chunk(
    world: Waypoint,
    session: WaypointSession,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> torch.Tensor:
    """Frames, or latents, of the session's next chunk."""
    request = make_request(session, tensors, **params)
    world.prepare_encode(request)
    while request.step < request.num_steps:
        step([world], [[request]])
    _, result = finish(world, request)
    return next(iter(result.values())).clone()


def latents_of(stages: Sequence[Waypoint], chunks: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Latents of a session, over pipeline stages that each have a session.

    chunks: arguments of `make_request` per chunk.
    """
    sessions = [open_session(world, output="latents") for world in stages]
    latents = []
    for chunk in chunks:
        requests = [make_request(session, output="latents", **chunk) for session in sessions]
        for world, request in zip(stages, requests, strict=True):
            world.prepare_encode(request)
        while requests[0].step < requests[0].num_steps:
            step(stages, [[request] for request in requests])
        latents.append(stages[-1].post_decode(requests[-1])[1]["latents"].clone())
        for world, request in zip(stages, requests, strict=True):
            world.commit(request)
    return torch.cat(latents, dim=1)
