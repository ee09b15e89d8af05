# SPDX-License-Identifier: Apache-2.0
"""Presets and degradations of world models in the real engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import running_engine
from helpers.waits import seconds

from vllm_omni.model_executor.models.registry import get_family

OMNI = {
    "scheduling": "deadline",
    "degradations": ["fewer_steps", "tiny_vae"],
    "model": {"preset": "small", "decoder": "wan", "fp8": True},
}
DEADLINES_S = (60.0, 0.001, 60.0)


@pytest.mark.parametrize(
    "family", ["lingbot_world", pytest.param("matrix_game", marks=pytest.mark.nightly)]
)
def test_a_preset_reaches_the_model_and_late_chunks_are_degraded(
    family: str, tmp_path: Path
) -> None:
    """A preset quantizes weights, keys and values, and a user's option overrides the preset's
    choice of decoder.

    A chunk that cannot meet its deadline runs two denoise steps and is decoded by the tiny decoder.
    Other chunks run all steps.
    """
    get_family(family).make_tiny(tmp_path, 0, get_family(family).layouts[0])
    image = torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3)
    prompt = {"prompt": "a harbour"} if family == "lingbot_world" else {}
    metas: list[dict[str, Any]] = []

    async def scenario() -> None:
        async with running_engine(tmp_path, OMNI, dtype="bfloat16") as client:
            config = client.engine.vllm_config
            assert config.model_config.quantization == "fp8_per_channel"
            assert config.cache_config.cache_dtype == "fp8"
            for index, deadline_s in enumerate(DEADLINES_S):
                first = {"seed": 1, **prompt} if index == 0 else {}
                meta, tensors = await client.send(
                    {"image": image} if index == 0 else None,
                    session_id="a",
                    chunk_index=index,
                    actions=[["w"]] * 3,
                    deadline_s=deadline_s,
                    chunk_period_s=deadline_s,
                    **first,
                )
                assert tensors["frames"].shape[0] == meta["num_frames"] == (12 if index else 9)
                metas.append(meta)

    asyncio.run(asyncio.wait_for(scenario(), seconds(240)))
    degraded = [meta.get("degradations", []) for meta in metas]
    assert degraded == [[], ["fewer_steps", "tiny_vae"], []]
    passes = [len(meta["timings_ms"]["steps"]) for meta in metas]
    assert passes[1] == 3 and passes[0] == passes[2] > 3
