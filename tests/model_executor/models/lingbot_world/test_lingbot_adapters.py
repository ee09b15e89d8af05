# SPDX-License-Identifier: Apache-2.0
"""LingBot World adapters, including those for its camera layers, produce the same results as merged
weights. Every CUDA graph belongs to one adapter.
"""

from pathlib import Path

import torch
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from helpers.chunks import run_adapted
from lingbot_world_driver import load_world, make_request, open_session

from vllm_omni.inputs import Lora
from vllm_omni.model_executor.layers.lora.store import AdapterStore
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld

TOLERANCE = 2e-4
"""Tolerance for fp32 latents of magnitude 1 after two chunks of five passes."""


def walk(world: LingBotWorld, store: AdapterStore, choices: list[list[Lora]]) -> list[torch.Tensor]:
    """Return the latents of a new session in which chunk i uses the adapters in `choices[i]`."""
    session = open_session(world, output="latents")
    return run_adapted(
        world,
        store,
        choices,
        lambda: make_request(world, session, output="latents", prompt="a beach"),
    )


def test_an_adapter_of_every_layer_equals_merged_weights(
    lingbot_world: Path, tmp_path: Path
) -> None:
    world = load_world(lingbot_world)
    target = world.adapter_targets()["transformer"]
    made = files.factors(target, target.matrices(), seed=1, size=0.1)
    store = make_store(world, {"ink": files.write_community(made, tmp_path / "ink.safetensors")})
    plain = walk(world, store, [[], []])
    got = walk(world, store, [[Lora(name="ink")]] * 2)
    reference = load_world(lingbot_world)
    files.merge(reference.transformer, files.differences(made, files.ALPHA / files.RANK))
    expected = walk(reference, make_store(reference), [[], []])
    assert not torch.allclose(expected[0], plain[0], atol=0.01)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)
    for one, other in zip(walk(world, store, [[], []]), plain, strict=True):
        assert torch.equal(one, other)
