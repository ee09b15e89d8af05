# SPDX-License-Identifier: Apache-2.0
"""`StepCostModel`: predicts the duration of a step from the steps measured while serving.

The model is linear in four features of a batch (see `StepCosts`), plus one feature per degradation
level. The cost of a degradation level is the difference in duration between a chunk's last step at
this level and at the previous level; it is 0 until a chunk at this level has been observed.

The model is fitted by least squares over the last `_WINDOW` steps, regularised towards the previous
estimate. A feature that does not occur in the window therefore retains its cost; for example, the
cost of larger batches is retained while only one stream is live. Outliers have less weight (Huber
loss), so a hiccup of a few seconds does not change the model, but a lasting change does. This
module depends on neither a clock nor vLLM.
"""

from collections.abc import Sequence

import numpy as np

from vllm_omni.core.sched.policy import StepCosts

_NUM_FEATURES = 4
_WINDOW = 96
_REFIT_EVERY = 4
_EAGER = 24
"""Number of initial steps during which the model is fitted after every step. It is then fitted once
every `_REFIT_EVERY` steps.
"""
_PULL = 1e-2
"""Weight of the previous estimate, expressed as a number of steps. The value is small, so the
previous estimate matters only for features that are absent from the window.
"""
_HUBER = 2.0
_ITERATIONS = 3


class StepCostModel:
    """Fits step costs to observations.

    The first estimate assumes that a step's duration is proportional to its batch size.

    Args:
        num_levels: Number of quality levels, including full quality.
    """

    def __init__(self, num_levels: int = 1) -> None:
        self.costs = StepCosts()
        self.num_observed = 0
        self._num_degraded = num_levels - 1
        self._features = np.zeros((_WINDOW, _NUM_FEATURES + self._num_degraded))
        self._durations_s = np.zeros(_WINDOW)
        self._scale = 1.0
        """The first observed batch size. All sizes are divided by it, so all features are close to
        one.
        """
        self._beta: np.ndarray | None = None

    def observe(
        self,
        total: float,
        first: float,
        last: float,
        duration_s: float,
        degraded: Sequence[float] = (),
    ) -> None:
        """Add one measured step.

        Args:
            total: Total size of the batch.
            first: Total size of the requests whose first step this was.
            last: Total size of the requests whose last step this was.
            duration_s: Duration of the step in seconds.
            degraded: Total size of the requests that ended at degradation level 1 or higher, at
                level 2 or higher, and so on. Empty if no ended request was degraded.
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
        # With only a few steps, an outlier would dominate the fit, so start from the median step
        # rather than the first one.
        beta = (
            before if count > 3 else self._proportional(float(np.median(durations_s / rows[:, 1])))
        )
        pull = np.full(len(before), _PULL)
        pull[0] *= 10.0  # changing a step's constant cost requires more evidence
        for _ in range(_ITERATIONS):
            residuals = np.abs(durations_s - rows @ beta)
            spread = 1.4826 * float(np.median(residuals)) + 1e-6
            weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
            weighted = rows * weights[:, None]
            beta = np.linalg.solve(
                weighted.T @ rows + np.diag(pull), weighted.T @ durations_s + pull * before
            )
        self._beta = beta
        step_s, size_s = max(0.0, float(beta[0])), max(0.0, float(beta[1]))
        first_s, *last_s = (float(value) / self._scale for value in (beta[2], *np.cumsum(beta[3:])))
        self.costs = StepCosts(step_s, size_s / self._scale, first_s, last_s[0], tuple(last_s[1:]))

    def _proportional(self, size_s: float) -> np.ndarray:
        beta = np.zeros(_NUM_FEATURES + self._num_degraded)
        beta[1] = size_s
        return beta
