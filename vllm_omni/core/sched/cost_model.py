# SPDX-License-Identifier: Apache-2.0
"""`StepCostModel`: predicts a step's duration; fitted to measured step durations while the engine serves.

Duration is modelled as linear in features of a batch (see `StepCosts`): four, and for each degradation level how much
less (or more) a chunk's end takes there than at the level before (0 until one has been seen). The fit is least squares
over the last `_WINDOW` steps, regularised towards the previous estimate, so that costs absent from the window (larger
batches, when only one stream is live) keep their value; steps far from prediction count less (Huber), so that a hiccup
of seconds does not move it, while a lasting change does. Knows no clock and no vLLM.
Held by tests/core/test_step_cost_model.py.
"""

from collections.abc import Sequence

import numpy as np

from vllm_omni.core.sched.policy import StepCosts

_NUM_FEATURES = 4
_WINDOW = 96
_REFIT_EVERY = 4
_EAGER = 24
"""Until so many steps have been seen the model is fitted after each of them."""
_PULL = 1e-2
"""Weight of the estimate before, in steps; small, so that it decides only where the window says nothing."""
_HUBER = 2.0
_ITERATIONS = 3


class StepCostModel:
    """Feed it `observe`; read `costs`. The first estimate makes everything proportional to size.

    num_levels: how many qualities chunks may have, the full one included.
    """

    def __init__(self, num_levels: int = 1) -> None:
        self.costs = StepCosts()
        self.num_observed = 0
        self._num_degraded = num_levels - 1
        self._features = np.zeros((_WINDOW, _NUM_FEATURES + self._num_degraded))
        self._durations_s = np.zeros(_WINDOW)
        self._scale = 1.0
        """Sizes are divided by the first one seen, so that all features are near one."""
        self._beta: np.ndarray | None = None

    def observe(
        self, total: float, first: float, last: float, duration_s: float, degraded: Sequence[float] = ()
    ) -> None:
        """Take in one step: the sizes in its batch, those that began and those that ended with it; how long it took.

        degraded: of those that ended, the sizes at level 1 and beyond, at level 2 and beyond, ...; () = none.
        """
        if total <= 0.0 or not duration_s >= 0.0:
            return
        if self._beta is None:
            self._scale = total
            self._beta = self._proportional(duration_s)
        slot = self.num_observed % _WINDOW
        scale = self._scale
        self._features[slot, :_NUM_FEATURES] = 1.0, total / scale, first / scale, last / scale
        self._features[slot, _NUM_FEATURES:] = np.divide(degraded, scale) if degraded else 0.0
        self._durations_s[slot] = duration_s
        self.num_observed += 1
        if self.num_observed <= _EAGER or self.num_observed % _REFIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        assert self._beta is not None
        count = min(self.num_observed, _WINDOW)
        rows, durations_s, before = self._features[:count], self._durations_s[:count], self._beta
        # One outlier among the first few would be the estimate: begin from the median step, not from the first.
        beta = before if count > 3 else self._proportional(float(np.median(durations_s / rows[:, 1])))
        pull = np.full(len(before), _PULL)
        pull[0] *= 10.0  # a cost of the step itself needs the most evidence
        for _ in range(_ITERATIONS):
            residuals = np.abs(durations_s - rows @ beta)
            spread = 1.4826 * float(np.median(residuals)) + 1e-6
            weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
            weighted = rows * weights[:, None]
            beta = np.linalg.solve(weighted.T @ rows + np.diag(pull), weighted.T @ durations_s + pull * before)
        self._beta = beta
        step_s, size_s = max(0.0, float(beta[0])), max(0.0, float(beta[1]))
        first_s, *last_s = (float(value) / self._scale for value in (beta[2], *np.cumsum(beta[3:])))
        self.costs = StepCosts(step_s, size_s / self._scale, first_s, last_s[0], tuple(last_s[1:]))

    def _proportional(self, size_s: float) -> np.ndarray:
        beta = np.zeros(_NUM_FEATURES + self._num_degraded)
        beta[1] = size_s
        return beta
