# SPDX-License-Identifier: Apache-2.0
"""Tests of the prompts of the tiny world's three styles."""

from training.tiny_world.prompts import PROMPTS
from training.tiny_world.village import STYLES


def test_sixty_prompts_a_style_all_different() -> None:
    """Each style has sixty prompts, and no prompt occurs in more than one style. Every prompt
    mentions the village and has no unfilled placeholder.
    """
    assert tuple(PROMPTS) == STYLES
    assert [len(prompts) for prompts in PROMPTS.values()] == [60, 60, 60]
    everything = [prompt for prompts in PROMPTS.values() for prompt in prompts]
    assert len({prompt.lower() for prompt in everything}) == 180
    assert all("village" in prompt and "{" not in prompt for prompt in everything)


def test_the_prompt_offered_names_its_style() -> None:
    assert [prompts[0] for prompts in PROMPTS.values()] == [
        "the village on a sunny day",
        "the village at dusk",
        "the village in the snow",
    ]
