# SPDX-License-Identifier: Apache-2.0
"""Drives an `AbotWorld` chunk by chunk in this process, as the runner does, without an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.chunks import run_request, run_stages

from vllm_omni.actions import image_tensor
from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.abot_world.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.abot_world.pipeline import (
    AbotChunk,
    AbotWorld,
    AbotWorldSetup,
)
from vllm_omni.model_executor.streaming.pinned import PinnedSession

HEIGHT, WIDTH = 32, 64
Request = DiffusionRequest[PinnedSession, AbotChunk]


def load_world(
    checkpoint: Path,
    parallel: ParallelContext | None = None,
    kv_dtype: torch.dtype | None = None,
    omni: dict[str, Any] | None = None,
    **options: Any,
) -> AbotWorld:
    config = OmniConfig(height=HEIGHT, width=WIDTH, model=options, **(omni or {}))
    layout, values = find_layout(checkpoint), hf_config(checkpoint)["abot_world"]
    setup = AbotWorldSetup.of_checkpoint(
        values, layout, config, torch.float32, parallel or ParallelContext(), kv_dtype=kv_dtype
    )
    world = AbotWorld(setup)
    world.load_checkpoint(layout)
    return world


def random_image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8, generator=generator)


def references(*names: str) -> dict[str, torch.Tensor]:
    """Return reference images as the tensors of a request."""
    return {image_tensor(name): random_image(10 + n) for n, name in enumerate(names)}


def open_session(world: AbotWorld, session_id: str = "a", **params: Any) -> PinnedSession:
    return world.new_session(DiffusionParams(session_id=session_id, **params))


def make_request(
    session: PinnedSession, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> Request:
    """Make a chunk's request; a first chunk gets an image and two references."""
    if session.chunk_index == 0:
        tensors = {"image": random_image(), **references("head", "front")} | (tensors or {})
    return DiffusionRequest(
        "request",
        DiffusionParams(session_id=session.session_id, **params),
        dict(tensors or {}),
        session,
    )


def run_chunk(
    world: AbotWorld,
    session: PinnedSession,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> torch.Tensor:
    """Frames, or latents, of the session's next chunk."""
    _, result = run_request(world, make_request(session, tensors, **params))
    return next(iter(result.values())).clone()


def latents_of(world: AbotWorld, chunks: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Latents of a session. chunks: arguments of `make_request` per chunk."""
    session = open_session(world, output="latents")
    parts = [run_chunk(world, session, output="latents", **chunk) for chunk in chunks]
    return torch.cat(parts, dim=1)


def latents_of_stages(
    stages: Sequence[AbotWorld], chunks: Sequence[dict[str, Any]]
) -> torch.Tensor:
    """`latents_of` over pipeline stages, each with its own session."""
    sessions = [open_session(world, output="latents") for world in stages]
    latents = []
    for chunk in chunks:
        requests = [make_request(each, output="latents", **chunk) for each in sessions]
        latents.append(run_stages(stages, requests)[1]["latents"].clone())
    return torch.cat(latents, dim=1)
