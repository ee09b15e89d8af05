# SPDX-License-Identifier: Apache-2.0
"""Tests of which denoise steps run when a step cache is used. test_lance_pipeline.py and
test_wan22_step_cache.py test the step cache in models.
"""

import pytest
import torch

from vllm_omni.model_executor.step_cache import computed_steps, step_cache_meta


def embeddings(*sizes: float) -> torch.Tensor:
    """Return one time embedding per step. The vectors have the given relative magnitudes and the
    same direction.
    """
    return torch.tensor(sizes)[:, None] * torch.tensor([1.0, -2.0, 4.0])


def test_steps_are_skipped_until_their_changes_reach_the_threshold() -> None:
    """If all relative changes are equal, every third step runs with a threshold of 3, and every
    step runs with a threshold of 1. The size of the changes does not matter.
    """
    for growth in (1.1, 1.001):
        sizes = [growth**step for step in range(9)]
        third = (True, False, False, True, False, False, True, False, True)
        assert (
            computed_steps(embeddings(*sizes).double(), 3.0)
            == third
            == computed_steps(embeddings(*sizes), 2.5)
        )
        assert all(computed_steps(embeddings(*sizes), 1.0))
    assert computed_steps(embeddings(1, 2, 4, 8, 16).bfloat16(), 2.0) == (
        True,
        False,
        True,
        False,
        True,
    )


def test_a_large_change_is_computed_at_once_and_resets_the_sum() -> None:
    """A step whose change alone exceeds the threshold runs immediately and resets the sum of
    changes. In this test, the mean relative change is 0.265.
    """
    sizes = embeddings(1, 1.1, 2.2, 2.3, 2.4, 2.5)
    assert computed_steps(sizes, 1.2) == (True, False, True, False, False, True)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_first_last_and_fixed_steps_are_computed(steps: int) -> None:
    computed = computed_steps(embeddings(*range(1, steps + 1)), 99.0)
    assert computed == tuple(step in (0, steps - 1) for step in range(steps))
    assert computed_steps(embeddings(1, 2, 3, 4, 5), 99.0, {2}) == (True, False, True, False, True)


def test_a_threshold_below_every_change_computes_every_step() -> None:
    assert all(computed_steps(embeddings(1, 1.01, 1.03, 1.04), 1e-6))


def test_constant_embeddings_compute_the_first_and_last_step() -> None:
    """If the embeddings do not change, only the first and last steps run. All-zero embeddings do
    not cause a division by zero.
    """
    assert computed_steps(embeddings(1, 1, 1, 1), 2.0) == (True, False, False, True)
    assert computed_steps(embeddings(0, 0, 0), 2.0) == (True, False, True)


def test_a_result_reports_the_computed_share() -> None:
    assert step_cache_meta(None, (True, False)) == {}
    assert step_cache_meta(0.2, (True, False, False, True)) == {
        "step_cache": {"threshold": 0.2, "computed_share": 0.5}
    }
