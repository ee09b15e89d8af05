# SPDX-License-Identifier: Apache-2.0
"""The real engine serves both checkpoint layouts in which weights are released."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import running_engine

from vllm_omni.model_executor.models.registry import get_family

FIRST_CHUNK: dict[str, Any] = {
    "session_id": "s",
    "prompt": "a field",
    "seed": 1,
    "actions": [["w"]] * 3,
}


async def first_frames(model: Path, **engine_args: Any) -> torch.Tensor:
    image = torch.arange(32 * 48 * 3).reshape(32, 48, 3).to(torch.uint8)
    async with running_engine(model, **engine_args) as client:
        _, tensors = await client.send({"image": image}, **FIRST_CHUNK)
        frames = tensors["frames"].clone()
    assert frames.shape == (9, 32, 48, 3) and frames.dtype == torch.uint8
    return frames


@pytest.mark.nightly
def test_both_released_layouts_yield_the_same_frames(tmp_path: Path) -> None:
    """The same weights yield the same pixels in the original layout and in the diffusers layout."""
    frames = []
    for layout in ("original", "diffusers"):
        model = tmp_path / layout
        get_family("lingbot_world").make_tiny(model, 3, layout)
        frames.append(asyncio.run(first_frames(model)))
    assert torch.equal(*frames)
    assert frames[0].float().std() > 1
