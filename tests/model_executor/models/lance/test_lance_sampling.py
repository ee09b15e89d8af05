# SPDX-License-Identifier: Apache-2.0
"""Tests of the denoise schedule, guidance and token sampling."""

import pytest
import torch

from vllm_omni.model_executor.models.lance.tasks.sampling import (
    ClassifierFreeGuidance,
    TokenChoice,
    flow_timesteps,
)


def test_the_released_schedule() -> None:
    """With 30 steps and a shift of 3.5, the schedule has 31 points, and its first and last points
    equal the published values.
    """
    t = flow_timesteps(30, 3.5)
    assert len(t) == 31
    torch.testing.assert_close(
        t[[0, 1, 29, 30]], torch.tensor([1.0, 0.9902, 0.1077, 0.0]), atol=5e-5, rtol=0
    )
    guidance = ClassifierFreeGuidance(4.0, (0.4, 1.0), "global", 0.0)
    assert sum(guidance.acts_at(float(value)) for value in t[:-1]) == 26


def test_guidance_of_scale_one_is_off() -> None:
    assert not ClassifierFreeGuidance(1.0, (0.0, 1.0), "global", 0.0).acts_at(0.5)
    assert not ClassifierFreeGuidance(4.0, (0.4, 1.0), "global", 0.0).acts_at(0.4)


@pytest.mark.parametrize(
    ("renorm", "limited"), [("global", True), ("channel", True), ("none", False)]
)
def test_renormalisation_limits_the_guided_velocity(renorm: str, limited: bool) -> None:
    torch.manual_seed(0)
    cond, uncond = torch.randn(6, 4), torch.randn(6, 4)
    guided = ClassifierFreeGuidance(4.0, (0.4, 1.0), renorm, 0.0).combine(cond, uncond)
    assert (float(guided.norm()) <= float(cond.norm()) + 1e-5) is limited


def test_the_smallest_factor_is_respected() -> None:
    cond, uncond = torch.ones(2, 2), -torch.ones(2, 2)
    assert torch.equal(
        ClassifierFreeGuidance(4.0, (0, 1), "global", 1.0).combine(cond, uncond),
        torch.full((2, 2), 7.0),
    )


def test_the_two_scales_are_combined_as_in_bagel() -> None:
    """Text guidance is applied before image guidance, as in BAGEL. Each of the two also works
    without the other.
    """
    cond, uncond, unseen = torch.full((2, 2), 3.0), torch.ones(2, 2), torch.full((2, 2), -1.0)
    both = ClassifierFreeGuidance(2.0, (0, 1), "none", 0.0, image_scale=1.5)
    assert torch.equal(both.combine(cond, uncond, unseen), torch.full((2, 2), -1 + 1.5 * (5 + 1)))
    image = ClassifierFreeGuidance(1.0, (0, 1), "none", 0.0, image_scale=1.5)
    assert image.acts_at(0.5)
    assert torch.equal(image.combine(cond, None, unseen), torch.full((2, 2), 5.0))


def test_sampling_follows_the_probabilities() -> None:
    """If 1000 evenly spaced values in [0, 1) replace the random numbers, each token's share is
    within 0.002 of its probability (0.6, 0.3 or 0.1).
    """
    logits = torch.tensor([0.3, 0.6, 0.1]).log()
    draws = (torch.arange(1000) + 0.5) / 1000
    drawn = torch.cat([TokenChoice(1.0, 1.0).choose(logits, draw.view(1)) for draw in draws])
    shares = torch.bincount(drawn, minlength=3) / 1000
    torch.testing.assert_close(shares, torch.tensor([0.3, 0.6, 0.1]), atol=2e-3, rtol=0)


def test_top_p_selects_the_likeliest_tokens() -> None:
    logits = torch.tensor([0.3, 0.6, 0.1]).log()
    drawn = {
        int(TokenChoice(1.0, 0.7).choose(logits, torch.tensor([u])))
        for u in (0.0, 0.3, 0.6, 0.9, 0.999999)
    }
    assert drawn == {0, 1}
    assert int(TokenChoice(1.0, 0.01).choose(logits, torch.tensor([0.999999]))) == 1
