# SPDX-License-Identifier: Apache-2.0
"""Drives a `DreamXWorld` chunk by chunk in this process, as the runner does, without an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.chunks import run_request, run_stages

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.dreamx_world.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.dreamx_world.pipeline import (
    DreamXChunk,
    DreamXSession,
    DreamXSetup,
    DreamXWorld,
)

HEIGHT, WIDTH = 64, 96
Request = DiffusionRequest[DreamXSession, DreamXChunk]
Chunks = Sequence[dict[str, Any]]


def load_world(
    checkpoint: Path,
    parallel: ParallelContext | None = None,
    kv_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> DreamXWorld:
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model=options)
    layout, values = find_layout(checkpoint), hf_config(checkpoint)["dreamx_world"]
    setup = DreamXSetup.of_checkpoint(
        values, layout, omni, dtype, parallel or ParallelContext(), kv_dtype=kv_dtype
    )
    world = DreamXWorld(setup)
    world.load_checkpoint(layout)
    return world


def start_image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8, generator=generator)


def open_session(world: DreamXWorld, session_id: str = "a", **params: Any) -> DreamXSession:
    params.setdefault("prompt", "a path in a forest")
    return world.new_session(DiffusionParams(session_id=session_id, **params))


def make_request(
    session: DreamXSession, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> Request:
    """Make a chunk's request; a first chunk gets an image and a prompt."""
    tensors = dict(tensors or {})
    if session.chunk_index == 0:
        tensors.setdefault("image", start_image())
        params.setdefault("prompt", "a path in a forest")
    return DiffusionRequest(
        "request", DiffusionParams(session_id=session.session_id, **params), tensors, session
    )


def run_chunk(
    world: DreamXWorld,
    session: DreamXSession,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> torch.Tensor:
    """Frames, or latents, of the session's next chunk."""
    _, result = run_request(world, make_request(session, tensors, **params))
    return next(iter(result.values())).clone()


def latents_of(world: DreamXWorld, chunks: Chunks, **params: Any) -> torch.Tensor:
    """Latents of a session. chunks: arguments of `make_request` per chunk."""
    session = open_session(world, output="latents")
    return torch.cat(
        [run_chunk(world, session, output="latents", **params, **chunk) for chunk in chunks], dim=1
    )


def latents_of_stages(stages: Sequence[DreamXWorld], chunks: Chunks) -> torch.Tensor:
    """`latents_of` over pipeline stages, each with its own session."""
    sessions = [open_session(world, output="latents") for world in stages]
    latents = []
    for chunk in chunks:
        requests = [make_request(each, output="latents", **chunk) for each in sessions]
        latents.append(run_stages(stages, requests)[1]["latents"].clone())
    return torch.cat(latents, dim=1)
