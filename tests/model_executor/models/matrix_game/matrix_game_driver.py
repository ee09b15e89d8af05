# SPDX-License-Identifier: Apache-2.0
"""Drives a `MatrixGame` chunk by chunk in this process, as the runner does, without an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.chunks import run_request, run_stages
from helpers.golden import golden_folder

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.matrix_game.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.matrix_game.pipeline import MatrixGame, MatrixGameSetup
from vllm_omni.model_executor.models.matrix_game.state import MatrixGameChunk, MatrixGameSession

GOLDEN = golden_folder("matrix_game_2")
HEIGHT, WIDTH = 32, 48
Request = DiffusionRequest[MatrixGameSession, MatrixGameChunk]


def load_game(
    checkpoint: Path,
    parallel: ParallelContext | None = None,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> MatrixGame:
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model=options)
    layout, values = find_layout(checkpoint), hf_config(checkpoint)["matrix_game"]
    setup = MatrixGameSetup.of_checkpoint(
        values, layout, omni, torch.float32, parallel or ParallelContext(), kv_dtype=kv_dtype
    )
    game = MatrixGame(setup)
    game.load_checkpoint(layout)
    return game


def start_image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8, generator=generator)


def open_session(game: MatrixGame, session_id: str = "a", **params: Any) -> MatrixGameSession:
    return game.new_session(DiffusionParams(session_id=session_id, **params))


def make_request(
    session: MatrixGameSession, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> Request:
    """Make a chunk's request; a first chunk gets an image."""
    tensors = dict(tensors or {})
    if session.chunk_index == 0:
        tensors.setdefault("image", start_image())
    return DiffusionRequest(
        "request", DiffusionParams(session_id=session.session_id, **params), tensors, session
    )


def run_chunk(
    game: MatrixGame,
    session: MatrixGameSession,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> torch.Tensor:
    """Frames, or latents, of the session's next chunk."""
    _, result = run_request(game, make_request(session, tensors, **params))
    return next(iter(result.values())).clone()


def latents_of(game: MatrixGame, chunks: Sequence[dict[str, Any]], **params: Any) -> torch.Tensor:
    """Latents of a session. chunks: arguments of `make_request` per chunk."""
    session = open_session(game, output="latents")
    return torch.cat(
        [run_chunk(game, session, output="latents", **params, **chunk) for chunk in chunks], dim=1
    )


def latents_of_stages(
    stages: Sequence[MatrixGame], chunks: Sequence[dict[str, Any]]
) -> torch.Tensor:
    """`latents_of` over pipeline stages, each with its own session."""
    sessions = [open_session(game, output="latents") for game in stages]
    latents = []
    for chunk in chunks:
        requests = [make_request(each, output="latents", **chunk) for each in sessions]
        latents.append(run_stages(stages, requests)[1]["latents"].clone())
    return torch.cat(latents, dim=1)
