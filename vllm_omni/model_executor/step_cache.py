# SPDX-License-Identifier: Apache-2.0
"""Step caching: skips denoise steps and reuses the prediction of an earlier step.

This follows TeaCache (Liu et al. 2024, arXiv 2411.19108): the prediction of a network changes
between two steps about as much as its time embedding. The changes since the last computed step are
summed. While the sum is below the threshold of the request, the prediction is reused. Two
differences from TeaCache: changes are relative to their mean over the schedule, because TeaCache's
polynomial must be fitted to each checkpoint; and the cache holds the prediction, not a residual.

The computed steps of a request depend only on its timesteps and are chosen before the first step.
Ranks therefore agree on them, and the host does not wait for the device. diffusers' caches
(`diffusers.hooks`) are not suitable, because they replace forward passes of diffusers' classes, and
First Block Cache compares tensors on the host in each step.
"""

# S steps, D channels of a time embedding

from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
import torch

StepCache = Annotated[float, msgspec.Meta(gt=0, le=100)]
"""Threshold of a request, relative to the mean change of its schedule. For example, 2 computes
about every second step and 3 every third.
"""

_ROUNDING = 1e-3
"""Tolerance of a threshold for rounding errors, as a fraction of it."""


def computed_steps(
    embeddings_SD: torch.Tensor, threshold: float, fixed: Collection[int] = ()
) -> tuple[bool, ...]:
    """Return whether each step is computed. The first and the last step always are.

    Args:
        embeddings_SD: Time embedding of each step, any float dtype. The change of a step is the
            mean absolute difference from the previous embedding, divided by the mean absolute value
            of the latter.
        threshold: See `StepCache`.
        fixed: Additional steps that are always computed.
    """
    before, after = embeddings_SD[:-1].float(), embeddings_SD[1:].float()
    scale = before.abs().mean(-1).clamp(min=torch.finfo(torch.float32).tiny)
    changes: list[float] = ((after - before).abs().mean(-1) / scale).tolist()
    bridged = (1 - _ROUNDING) * threshold * sum(changes) / max(1, len(changes))
    computed, since = [True], 0.0
    for step, change in enumerate(changes, 1):
        since += change
        needed = since >= bridged > 0 or step in fixed or step == len(changes)
        computed.append(needed)
        if needed:
            since = 0.0
    return tuple(computed)


def step_cache_meta(threshold: float | None, computed: Sequence[bool]) -> dict[str, Any]:
    """Return the metadata of a result: the threshold and the share of computed steps.

    Empty without a threshold.
    """
    if threshold is None:
        return {}
    share = sum(computed) / len(computed) if computed else 1.0
    return {"step_cache": {"threshold": threshold, "computed_share": round(share, 4)}}
