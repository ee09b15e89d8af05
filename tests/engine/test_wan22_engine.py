# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2 in the real engine: one rank, several parallel ranks, pipeline stages and a VAE stage.

The tests are nightly because each setting needs an engine. test_openai_wan22.py serves the same
model over HTTP in every run.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import running_engine
from helpers.wan22_driver import HEIGHT, WIDTH, load_model, make_video, picture

from vllm_omni.outputs import RequestFailed

pytestmark = pytest.mark.nightly

SETTINGS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP 2": {"tensor_parallel_size": 2},
    "Ulysses 2": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_parallel_size": 2},
    "CFG 2": {"tensor_parallel_size": 2, "cfg_parallel": True},
    "VAE stage": {"pipeline_parallel_size": 2, "vae_stage": True},
    "PP 2 + VAE stage": {"pipeline_parallel_size": 3, "vae_stage": True},
    "PP 2 x TP 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "PP 2 x Ulysses 2": {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
    },
    "PP 2 x CFG 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "cfg_parallel": True},
    "VAE stage x TP 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "vae_stage": True},
    "VAE stage x Ulysses 2": {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "vae_stage": True,
    },
    "VAE stage x CFG 2": {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "cfg_parallel": True,
        "vae_stage": True,
    },
}
TOLERANCE = {
    name: 1e-4 if "tensor_parallel_size" in flags else 0.0 for name, flags in SETTINGS.items()
}
"""Tolerance for each setting. It is 0 for pipeline stages, which compute exactly what one rank
computes. Ranks that split layers or guidance branches sum in a different order.
"""


@pytest.fixture(scope="module")
def i2v(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("wan2_2", "i2v")


@pytest.mark.parametrize("setting", SETTINGS)
def test_videos_of_one_batch_equal_the_model_alone(i2v: Path, setting: str) -> None:
    """Three concurrent image-to-video requests that use both experts return the same videos as
    requests that run by themselves.

    Meanwhile, another request is aborted and one is refused.
    """
    wanted: list[dict[str, Any]] = [
        {"seed": seed, "num_inference_steps": 6 + seed, "prompt": "a river", "num_frames": 9}
        for seed in range(3)
    ]
    model = load_model(i2v)
    expected = [
        make_video(model, {"image": picture()}, output="latents", **fields)[1]["latents"]
        for fields in wanted
    ]
    flags = dict(SETTINGS[setting])
    options = {"max_num_frames": 9}
    options |= {name: flags.pop(name, False) for name in ("sequence_parallel", "cfg_parallel")}
    omni = {
        "height": HEIGHT,
        "width": WIDTH,
        "model": options,
        "vae_stage": flags.pop("vae_stage", False),
    }

    async def scenario() -> list[torch.Tensor]:
        async with running_engine(i2v, omni, **flags) as client:
            image = {"image": picture()}
            long = asyncio.create_task(
                client.send(
                    image,
                    session_id="long",
                    one_shot=True,
                    **{**wanted[0], "num_inference_steps": 200},
                )
            )
            results = await asyncio.gather(
                *(
                    client.send(
                        image, session_id=f"s{number}", one_shot=True, output="latents", **fields
                    )
                    for number, fields in enumerate(wanted)
                )
            )
            with pytest.raises(RequestFailed, match="send the tensor 'image'"):
                await client.send(session_id="bare", one_shot=True, **wanted[0])
            assert not long.done()
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            after = await client.send(
                image, session_id="after", one_shot=True, output="latents", **wanted[0]
            )
            return [tensors["latents"].clone() for _, tensors in (*results, after)]

    got = asyncio.run(scenario())
    for number, latents in enumerate(got):
        difference = (latents - expected[number % 3]).abs().max().item()
        assert difference <= TOLERANCE[setting], (setting, number, difference)
