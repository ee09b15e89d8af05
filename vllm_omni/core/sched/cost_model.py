# SPDX-License-Identifier: Apache-2.0
"""`StepCostModel`: what a step takes, fitted to measured step durations while the engine serves.

Duration is modelled as linear in four features of a batch (see `StepCosts`). The fit is least squares over the last
`_WINDOW` steps, drawn towards the estimate before, so that what the last steps say nothing about (larger batches, when
only one stream is live) keeps its value; steps far from prediction count less (Huber), so that a hiccup of seconds does
not move it, while a lasting change does. Knows no clock and no vLLM. Held by tests/core/test_step_cost_model.py.
"""

import numpy as np

from vllm_omni.core.sched.policy import StepCosts

_WINDOW = 96
_REFIT_EVERY = 4
_EAGER = 24
"""Until so many steps have been seen the model is fitted after each of them."""
_PULL = 1e-2
"""Weight of the estimate before, in steps; small, so that it decides only where the window says nothing."""
_HUBER = 2.0
_ITERATIONS = 3


class StepCostModel:
    """Feed it `observe`; read `costs`. The first estimate makes everything proportional to size."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.num_observed = 0
        self._features = np.zeros((_WINDOW, 4))
        self._durations_s = np.zeros(_WINDOW)
        self._scale = 1.0
        """Sizes are divided by the first one seen, so that all features are near one."""
        self._beta: np.ndarray | None = None

    def observe(self, total: float, first: float, last: float, duration_s: float) -> None:
        """Take in one step: the sizes in its batch, those that began and those that ended with it; how long it took."""
        if total <= 0.0 or not duration_s >= 0.0:
            return
        if self._beta is None:
            self._scale = total
            self._beta = np.array([0.0, duration_s, 0.0, 0.0])
        slot = self.num_observed % _WINDOW
        scale = self._scale
        self._features[slot] = 1.0, total / scale, first / scale, last / scale
        self._durations_s[slot] = duration_s
        self.num_observed += 1
        if self.num_observed <= _EAGER or self.num_observed % _REFIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        assert self._beta is not None
        count = min(self.num_observed, _WINDOW)
        rows, durations_s, before = self._features[:count], self._durations_s[:count], self._beta
        # One outlier among the first few would be the estimate: begin from the median step, not from the first.
        beta = before if count > 3 else np.array([0.0, float(np.median(durations_s / rows[:, 1])), 0.0, 0.0])
        pull = _PULL * np.array([10.0, 1.0, 1.0, 1.0])  # a cost of the step itself needs the most evidence
        for _ in range(_ITERATIONS):
            residuals = np.abs(durations_s - rows @ beta)
            spread = 1.4826 * float(np.median(residuals)) + 1e-6
            weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
            weighted = rows * weights[:, None]
            beta = np.linalg.solve(weighted.T @ rows + np.diag(pull), weighted.T @ durations_s + pull * before)
        self._beta = beta
        step_s, size_s = max(0.0, float(beta[0])), max(0.0, float(beta[1]))
        self.costs = StepCosts(step_s, size_s / self._scale, float(beta[2]) / self._scale, float(beta[3]) / self._scale)
