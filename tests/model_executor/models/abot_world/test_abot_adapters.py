# SPDX-License-Identifier: Apache-2.0
"""ABot-World with a LoRA adapter produces the same results as ABot-World with the adapter merged
into its weights. A LoRA adapter cannot change the model's built-in action adapter.
"""

from pathlib import Path

import pytest
import torch
from abot_driver import load_world, make_request, open_session
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from helpers.chunks import run_adapted

from vllm_omni.inputs import Lora
from vllm_omni.model_executor.layers.lora.store import AdapterStore
from vllm_omni.model_executor.models.abot_world.pipeline import AbotWorld

TOLERANCE = 2e-4
"""Tolerance for fp32 latents of magnitude 1 after two chunks. Results are not bit-identical,
because merging weights changes the order of summation.
"""
INK = [Lora(name="ink")]


def every_layer(target: files.AdapterTarget) -> files.Factors:
    return files.factors(target, target.matrices(), seed=1, size=0.1)


def walk(world: AbotWorld, store: AdapterStore, choices: list[list[Lora]]) -> list[torch.Tensor]:
    """Return the latents of a new session in which chunk i uses the adapters in `choices[i]`."""
    session = open_session(world, output="latents")
    return run_adapted(
        world, store, choices, lambda: make_request(session, output="latents", actions=[["w"]])
    )


def test_an_adapter_of_every_layer_equals_merged_weights(
    layouts: dict[str, Path], tmp_path: Path
) -> None:
    """An adapter for every layer, which also applies to the reference images, produces the same
    latents as weights with the adapter merged in. The latents of a later session without an adapter
    are bit-identical to the base model's.
    """
    world = load_world(layouts["original"])
    made = every_layer(world.adapter_targets()["transformer"])
    store = make_store(world, {"ink": files.write_community(made, tmp_path / "ink.safetensors")})
    plain = walk(world, store, [[], []])
    got = walk(world, store, [INK, INK])
    switched = walk(world, store, [[], INK])
    reference = load_world(layouts["original"])
    files.merge(reference.transformer, files.differences(made, files.ALPHA / files.RANK))
    expected = walk(reference, make_store(reference), [[], []])
    assert not torch.allclose(expected[0], plain[0], atol=0.01)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)
    assert torch.equal(switched[0], plain[0])
    assert not torch.allclose(switched[1], plain[1], atol=0.01)
    for one, other in zip(walk(world, store, [[], []]), plain, strict=True):
        assert torch.equal(one, other)


def test_a_change_of_the_action_adapter_is_refused(
    layouts: dict[str, Path], tmp_path: Path
) -> None:
    """A LoRA adapter that changes the action adapter is rejected, because the action adapter's
    convolutions are summed at load time.
    """
    path = tmp_path / "keys.safetensors"
    files.save_file({"act_control_adapter.conv.diff": torch.ones(64, 8192, 2, 2)}, path)
    with pytest.raises(ValueError, match="act_control_adapter"):
        make_store(load_world(layouts["original"]), {"keys": path})
