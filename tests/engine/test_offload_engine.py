# SPDX-License-Identifier: Apache-2.0
"""`--cpu-offload-gb` on several ranks in the real engine.

tests/worker/test_runner_weights.py covers one rank, FP8 weights and reloads.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine
from helpers.wan22_driver import HEIGHT, WIDTH

ALL = {"cpu_offload_gb": 1.0}


@pytest.fixture(scope="module")
def t2v(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("wan2_2", "t2v")


async def videos(client: EngineClient) -> list[torch.Tensor]:
    """Return two videos generated with different numbers of denoising steps. They are generated
    concurrently, so one engine step runs both experts.
    """
    wanted = [{"seed": seed, "num_inference_steps": 4 + seed, "num_frames": 9} for seed in range(2)]
    sent = (
        client.send(session_id=f"s{n}", one_shot=True, prompt="a river", output="latents", **fields)
        for n, fields in enumerate(wanted)
    )
    return [tensors["latents"].clone() for _, tensors in await asyncio.gather(*sent)]


def equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


async def made_by(model: Path, **arguments: Any) -> list[torch.Tensor]:
    omni = {"height": HEIGHT, "width": WIDTH, "model": {"max_num_frames": 9}}
    async with running_engine(model, omni, **arguments) as client:
        return await videos(client)


@pytest.mark.nightly
@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_offloaded_experts_of_two_ranks_change_no_video(t2v: Path, split: dict[str, int]) -> None:
    assert equal(asyncio.run(made_by(t2v, **ALL, **split)), asyncio.run(made_by(t2v, **split)))
