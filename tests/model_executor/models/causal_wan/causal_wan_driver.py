# SPDX-License-Identifier: Apache-2.0
"""Drive a `CausalWan` chunk by chunk in this process, as the runner does, without an engine
around it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, SessionState
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import find_layout, hf_config
from vllm_omni.model_executor.models.causal_wan.family import FAMILY
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan, StreamSetup

HEIGHT, WIDTH = 32, 48
Result = tuple[dict[str, Any], dict[str, torch.Tensor]]


def load_model(
    checkpoint: Path,
    parallel: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    serving: Mapping[str, Any] | None = None,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> CausalWan:
    """serving: `OmniConfig`'s own options."""
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
    """Check the options `serving` of `OmniConfig` on `stages` pipeline stages as a start does."""
    FAMILY.check_refusals(hf_config(checkpoint), OmniConfig(**serving), stages)


def input_video(frames: range, speed: float = 1.0) -> torch.Tensor:
    """A pattern that moves `speed` pixels a frame, uint8 [T, H, W, 3]."""
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


def step(model: CausalWan, batch: Sequence[DiffusionRequest]) -> None:
    """One denoise step of requests that may be at different steps."""
    model.step_scheduler(batch, model.denoise_step(batch))
    for request in batch:
        request.step += 1


def finish(model: CausalWan, request: DiffusionRequest) -> Result:
    result = model.post_decode(request)
    model.commit(request)
    return result


def run_chunk(
    model: CausalWan,
    session: SessionState,
    tensors: dict[str, torch.Tensor] | None = None,
    **params: Any,
) -> Result:
    request = make_request(session, tensors, **params)
    model.prepare_encode(request)
    while request.step < request.num_steps:
        step(model, [request])
    return finish(model, request)


def open_session(model: CausalWan, session_id: str = "a", **params: Any) -> SessionState:
    return model.new_session(
        DiffusionParams(session_id=session_id, **{"prompt": "a beach", **params})
    )


def stream(model: CausalWan, chunks: int, **params: Any) -> list[torch.Tensor]:
    """The latents of a new stream's first chunks."""
    session = open_session(model, output="latents", **params)
    return [
        run_chunk(model, session, **{"prompt": "a beach", "output": "latents", **params})[1][
            "latents"
        ]
        for _ in range(chunks)
    ]
