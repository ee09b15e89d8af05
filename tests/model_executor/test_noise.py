# SPDX-License-Identifier: Apache-2.0
"""Noise depends only on the seed, chunk and step."""

import pytest
import torch

from vllm_omni.model_executor.schedules import ChunkNoise, noise_seed, standard_normal


def test_the_same_key_gives_the_same_bits_in_any_order() -> None:
    first = [standard_normal((4, 5), 7, chunk, step) for chunk in range(3) for step in range(4)]
    torch.rand(100)  # the global random generator has no effect on the noise
    again = [
        standard_normal((4, 5), 7, chunk, step)
        for chunk in reversed(range(3))
        for step in reversed(range(4))
    ]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))


def test_every_seed_chunk_and_step_has_a_different_hash() -> None:
    keys = [
        (seed, chunk, step) for seed in (0, 1, 11) for chunk in (0, 1, 11) for step in (0, 1, 11)
    ]
    assert len({noise_seed(*key) for key in keys}) == len(keys)


def test_the_hash_has_its_recorded_value() -> None:
    """The hash matches its recorded value. A different hash would change every replayed session."""
    assert noise_seed(0, 0, 0) == 9044811311333822937


def test_noise_is_standard_normal() -> None:
    """The mean and standard deviation of 100,000 samples are within 0.02 of 0 and 1. This tolerance
    is six standard errors.
    """
    noise = standard_normal((100_000,), 3, 1, 2)
    assert noise.dtype == torch.float32
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_noise_of_a_chunk_is_drawn_per_step(device: str) -> None:
    """A chunk's noise can be sampled for its steps in any order, and each step's noise is
    bit-identical whatever the order. Sampling does not wait for a busy GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    noise = ChunkNoise((4, 5), 7, 2, torch.device(device))
    if device == "cuda":
        torch.cuda._sleep(500_000_000)
    drawn = {step: noise.draw(step) for step in (2, 0, 1)}
    if device == "cuda":
        assert not torch.cuda.current_stream().query()
    assert all(
        torch.equal(draw.cpu(), standard_normal((4, 5), 7, 2, step)) for step, draw in drawn.items()
    )
