# SPDX-License-Identifier: Apache-2.0
"""Drives a `Wan22` model in this process as the runner does, without an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.model_executor.models.wan2_2.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.wan2_2.pipeline import Wan22, Wan22Setup

HEIGHT, WIDTH = 64, 96
"""Frame size in pixels. Height and width are multiples of 32, because each token of the 5B model
represents 32 by 32 pixels.
"""
NUM_FRAMES = 9
PROMPT, NEGATIVE = "A lighthouse stands on a cliff", "no cars"
"""Prompts in which each word is a single token. Other words would need the tokenizer's byte
fallback, which Transformers 5 lacks (text_encoder/encoder.py).
"""
LAYOUTS = ("t2v", "i2v", "ti2v")
Result = tuple[dict[str, Any], dict[str, torch.Tensor]]


def write_checkpoints(folder: Path) -> dict[str, Path]:
    for layout in LAYOUTS:
        (folder / layout).mkdir()
        get_family("wan2_2").make_tiny(folder / layout, 0, layout)
    return {layout: folder / layout for layout in LAYOUTS}


def load_model(checkpoint: Path, parallel: ParallelContext | None = None, **options: Any) -> Wan22:
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model={"max_num_frames": NUM_FRAMES, **options})
    layout, values = find_layout(checkpoint), hf_config(checkpoint)["wan2_2"]
    setup = Wan22Setup.of_checkpoint(
        values, layout.tokenizer, omni, torch.float32, parallel or ParallelContext()
    )
    model = Wan22(setup)
    model.load_checkpoint(layout)
    return model


def picture() -> torch.Tensor:
    """Return an image with a pattern. Shape: [H, W, 3], uint8."""
    y, x = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    waves = [torch.sin((x + scale * y) / 7.0) for scale in (0.3, 0.7, 1.1)]
    return ((torch.stack(waves, dim=-1) * 0.5 + 0.5) * 255).round().to(torch.uint8)


def start(
    model: Wan22, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> DiffusionRequest:
    """Return a request that is ready to denoise."""
    fields = {
        "session_id": "a",
        "one_shot": True,
        "prompt": PROMPT,
        "num_inference_steps": 4,
        **params,
    }
    sent = DiffusionParams(**fields)
    request = DiffusionRequest("request", sent, dict(tensors or {}), model.new_session(sent))
    model.prepare_encode(request)
    return request


def step(model: Wan22, batch: Sequence[DiffusionRequest]) -> None:
    """Run one denoise step for a batch of requests. The requests may be at different steps."""
    model.step_scheduler(batch, model.denoise_step(batch))
    for request in batch:
        request.step += 1


def finish(model: Wan22, request: DiffusionRequest) -> Result:
    while request.step < request.num_steps:
        step(model, [request])
    result = model.post_decode(request)
    model.commit(request)
    return result


def make_video(
    model: Wan22, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> Result:
    return finish(model, start(model, tensors, **params))
