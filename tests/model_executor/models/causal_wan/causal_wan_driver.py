# SPDX-License-Identifier: Apache-2.0
"""Drives a `CausalWan` model chunk by chunk in this process, as the runner does, without an
engine.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.chunks import Result, run_request

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, SessionState
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import find_layout, hf_config
from vllm_omni.model_executor.models.causal_wan.family import FAMILY
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan, StreamSetup

HEIGHT, WIDTH = 32, 48


def load_model(
    checkpoint: Path,
    parallel: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    serving: Mapping[str, Any] | None = None,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> CausalWan:
    """Load a model.

    Args:
        serving: Fields of `OmniConfig`.
    """
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model=options, **(serving or {}))
    layout = find_layout(checkpoint)
    values = hf_config(checkpoint)["causal_wan"]
    setup = StreamSetup.of_checkpoint(
        values, layout, omni, dtype, parallel or ParallelContext(), kv_dtype=kv_dtype
    )
    model = CausalWan(setup)
    model.load_checkpoint(layout)
    return model


def check_refusals(checkpoint: Path, stages: int, **serving: Any) -> None:
    """Run a server's startup checks for `stages` pipeline stages with the `OmniConfig` options in
    `serving`.
    """
    FAMILY.check_refusals(hf_config(checkpoint), OmniConfig(**serving), stages)


def input_video(frames: range, speed: float = 1.0) -> torch.Tensor:
    """Return a video of a pattern that moves by `speed` pixels per frame. Shape: [T, H, W, 3],
    uint8.
    """
    t, y, x = torch.meshgrid(
        torch.tensor(frames), torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij"
    )
    waves = [torch.sin((x + scale * y + speed * t) / 5.0) for scale in (0.3, 0.7, 1.1)]
    return ((torch.stack(waves, dim=-1) * 0.5 + 0.5) * 255).round().to(torch.uint8)


def make_request(
    session: SessionState, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> DiffusionRequest:
    return DiffusionRequest(
        "request",
        DiffusionParams(**{"session_id": session.session_id, **params}),
        dict(tensors or {}),
        session,
    )


def run_chunk(
    model: CausalWan,
    session: SessionState,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> Result:
    return run_request(model, make_request(session, tensors, **params))


def open_session(model: CausalWan, session_id: str = "a", **params: Any) -> SessionState:
    return model.new_session(
        DiffusionParams(session_id=session_id, **{"prompt": "a beach", **params})
    )


def stream(model: CausalWan, chunks: int, **params: Any) -> list[torch.Tensor]:
    """Return the latents of a new stream's first `chunks` chunks."""
    session = open_session(model, output="latents", **params)
    return [
        run_chunk(model, session, **{"prompt": "a beach", "output": "latents", **params})[1][
            "latents"
        ]
        for _ in range(chunks)
    ]
