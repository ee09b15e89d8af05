# SPDX-License-Identifier: Apache-2.0
"""Drives a `Lance` model in this process, as the runner does, without an engine."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.chunks import Result, finish, step

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, SessionState
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lance.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.lance.pipeline import Lance, LanceSetup

_numbers = itertools.count()


def load_lance(
    checkpoint: Path,
    parallel: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Lance:
    layout = find_layout(checkpoint)
    stored = hf_config(checkpoint)["lance"]
    setup = LanceSetup.of_checkpoint(
        stored, layout, OmniConfig(model=options), dtype, parallel or ParallelContext()
    )
    lance = Lance(setup)
    lance.load_checkpoint(layout)
    return lance


def image(seed: int = 0, height: int = 60, width: int = 90) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


def clip(frames: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.stack([image(seed + number) for number in range(frames)])


REQUESTS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "t2i": ({"prompt": "a cat", "height": 64, "width": 96, "num_inference_steps": 3}, {}),
    "image_edit": (
        {"prompt": "no hat", "num_inference_steps": 2, "options": {"resolution": "image_256res"}},
        {"image": image()},
    ),
    "t2v": (
        {"prompt": "a wave", "height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3},
        {},
    ),
    "i2v": (
        {"prompt": "a wave", "height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3},
        {"image": image()},
    ),
    "video_edit": (
        {
            "prompt": "red",
            "num_inference_steps": 2,
            "options": {"task": "video_edit", "resolution": "video_192p"},
        },
        {"video": clip()},
    ),
    "x2t_image": (
        {
            "prompt": "what?",
            "options": {"modalities": ["text"], "resolution": "image_256res", "max_tokens": 9},
        },
        {"image": image()},
    ),
    "x2t_video": (
        {
            "prompt": "what?",
            "options": {"modalities": ["text"], "resolution": "video_192p", "max_tokens": 9},
        },
        {"video": clip()},
    ),
}
"""Parameters and tensors of one small request per task."""


def request_of(task: str, **changes: Any) -> DiffusionRequest:
    """Return the request for `task` from `REQUESTS`, with the parameters in `changes` and without a
    session.
    """
    fields, tensors = REQUESTS[task]
    return make_request({**fields, **changes}, tensors)


def make_request(
    fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> DiffusionRequest:
    number = next(_numbers)
    fields = {"session_id": f"session-{number}", "one_shot": True, **fields}
    return DiffusionRequest(
        f"request-{number}", DiffusionParams(**fields), dict(tensors or {}), None
    )  # type: ignore[arg-type]


def prepare(lance: Lance, request: DiffusionRequest, session: SessionState | None = None) -> None:
    request.session = session or lance.new_session(request.params)
    lance.prepare_encode(request)


def run(lance: Lance, request: DiffusionRequest, session: SessionState | None = None) -> Result:
    """Run one request to completion on its own."""
    prepare(lance, request, session)
    while request.step < request.num_steps:
        step(lance, [request])
    return finish(lance, request)
