# SPDX-License-Identifier: Apache-2.0
"""The step cost model learns the costs of simulated steps and is robust to outliers."""

import random

import pytest

from vllm_omni.core.sched.cost_model import StepCostModel
from vllm_omni.core.sched.policy import StepCosts

TRUE = StepCosts(step_s=0.010, size_s=0.047 / 100, first_s=0.005 / 100, last_s=0.150 / 100)


def duration_s(costs: StepCosts, total: float, first: float, last: float) -> float:
    return costs.step_s + costs.size_s * total + costs.first_s * first + costs.last_s * last


def show(
    model: StepCostModel,
    costs: StepCosts,
    steps: int,
    rng: random.Random,
    most: int = 4,
    noise: float = 0.02,
) -> None:
    for _ in range(steps):
        batch = rng.randint(1, most)
        total = 100.0 * batch
        first, last = 100.0 * (rng.random() < 0.2), 100.0 * (rng.random() < 0.2)
        model.observe(
            total, first, last, duration_s(costs, total, first, last) * rng.gauss(1, noise)
        )


def test_the_parts_of_a_step_are_found() -> None:
    """With 2 % noise in the step durations, the model learns a chunk's cost to within 5 % and each
    component of the cost to within 25 %.
    """
    model = StepCostModel()
    show(model, TRUE, 200, random.Random(0))
    found = model.costs
    assert found.of_chunk(5, 100.0) == pytest.approx(TRUE.of_chunk(5, 100.0), rel=0.05)
    for name in ("step_s", "size_s", "last_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.25), name


def test_after_one_step_costs_are_proportional_to_size() -> None:
    model = StepCostModel()
    model.observe(100.0, 100.0, 0.0, 0.05)
    assert model.costs.of_chunk(4, 200.0, started=True) == pytest.approx(0.4, rel=0.05)


def test_outliers_do_not_change_the_costs() -> None:
    """When one step in twenty takes 3 s longer, the predicted cost stays within 15 % of the true
    one.
    """
    model, rng = StepCostModel(), random.Random(1)
    for _ in range(20):
        show(model, TRUE, 19, rng)
        model.observe(100.0, 0.0, 0.0, 3.0)
    assert model.costs.of_chunk(5, 100.0) == pytest.approx(TRUE.of_chunk(5, 100.0), rel=0.15)


def test_a_lasting_change_is_learnt() -> None:
    """When all steps become twice as slow, the model learns the new cost within two windows."""
    model, rng = StepCostModel(), random.Random(3)
    show(model, TRUE, 200, rng)
    slow = StepCosts(2 * TRUE.step_s, 2 * TRUE.size_s, 2 * TRUE.first_s, 2 * TRUE.last_s)
    show(model, slow, 192, rng)
    assert model.costs.of_chunk(5, 100.0) == pytest.approx(slow.of_chunk(5, 100.0), rel=0.1)


def test_unobserved_costs_keep_their_values() -> None:
    """After 2000 steps that each run at most one stream, the model still predicts the cost of a
    step with four streams to within 15 %.
    """
    model, rng = StepCostModel(), random.Random(4)
    show(model, TRUE, 200, rng)
    before = duration_s(model.costs, 400.0, 0.0, 0.0)
    show(model, TRUE, 2000, rng, most=1)
    assert duration_s(model.costs, 400.0, 0.0, 0.0) == pytest.approx(before, rel=0.15)


def show_ladder(model: StepCostModel, chunks: int, rng: random.Random, level: int) -> None:
    """Observe chunks of five steps at `level`. From level 2 onwards, the end of a chunk takes 10 ms
    instead of 150 ms.
    """
    for _ in range(chunks):
        for step in range(5):
            first, last = 100.0 * (step == 0), 100.0 * (step == 4)
            took_s = duration_s(TRUE, 100.0, first, last) - (0.140 if last and level >= 2 else 0.0)
            degraded = [last * (level >= 1), last * (level >= 2)]
            model.observe(100.0, first, last, took_s * rng.gauss(1, 0.02), degraded)


def test_the_cost_of_a_level_is_learnt() -> None:
    """The model learns a level's cost within ten chunks. Until then, it uses the cost of the
    next-better level.
    """
    model, rng = StepCostModel(num_levels=3), random.Random(5)
    show_ladder(model, 20, rng, level=0)
    at = [model.costs.of_chunk(5, 100.0, level=level) for level in range(3)]
    assert at == pytest.approx([TRUE.of_chunk(5, 100.0)] * 3, rel=0.05)
    show_ladder(model, 10, rng, level=2)
    saved_s = model.costs.of_chunk(5, 100.0) - model.costs.of_chunk(5, 100.0, level=2)
    assert saved_s == pytest.approx(0.140, rel=0.1)
    assert model.costs.of_chunk(5, 100.0) == pytest.approx(TRUE.of_chunk(5, 100.0), rel=0.1)


def test_the_cost_of_full_quality_is_kept_during_overload() -> None:
    """After a thousand degraded chunks, the model still predicts the cost of full quality."""
    model, rng = StepCostModel(num_levels=3), random.Random(6)
    show_ladder(model, 20, rng, level=0)
    show_ladder(model, 1000, rng, level=2)
    assert model.costs.of_chunk(5, 100.0) == pytest.approx(TRUE.of_chunk(5, 100.0), rel=0.15)
    assert model.costs.of_chunk(5, 100.0, level=2) == pytest.approx(
        TRUE.of_chunk(5, 100.0) - 0.140, rel=0.05
    )


@pytest.mark.parametrize(
    "bad", [(0.0, 0.0, 0.0, 1.0), (100.0, 0.0, 0.0, -1.0), (100.0, 0.0, 0.0, float("nan"))]
)
def test_invalid_steps_are_ignored(bad: tuple[float, float, float, float]) -> None:
    model = StepCostModel()
    model.observe(*bad)
    assert model.num_observed == 0 and model.costs == StepCosts()


@pytest.mark.parametrize("scale", [1.0, 64.0, 0.25])
def test_costs_do_not_depend_on_the_unit_of_size(scale: float) -> None:
    """For noise-free steps, the learnt costs are within 5 % of the true costs, whatever the unit of
    the sizes.
    """
    true = StepCosts(step_s=0.2, size_s=0.5 / scale, first_s=0.8 / scale, last_s=0.3 / scale)
    model, rng = StepCostModel(), random.Random(7)
    for _ in range(400):
        total, first, last = (scale * rng.randint(low, 4) for low in (1, 0, 0))
        model.observe(total, first, last, duration_s(true, total, first, last))
    for name in ("step_s", "size_s", "first_s", "last_s"):
        assert getattr(model.costs, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert model.costs.degraded_last_s == (), "no levels, no costs of levels"


def test_one_slow_step_of_the_first_three_is_an_outlier() -> None:
    """If one of the first three steps is slow, the model treats it as an outlier.

    A slow first step still has a weight of a ninth until more steps are observed.
    """
    for position in range(3):
        model = StepCostModel()
        for step in range(3):
            model.observe(50.0, 0.0, 0.0, 9.0 if step == position else 0.1)
        most_s = 1.0 if position == 0 else 0.25
        assert 0.08 < model.costs.of_chunk(1, 50.0, started=True) < most_s, position


def test_the_smallest_step_is_observed() -> None:
    """The model accepts a step with a size below one and a duration of zero."""
    model = StepCostModel()
    model.observe(0.5, 0.0, 0.0, 0.0)
    assert model.num_observed == 1
