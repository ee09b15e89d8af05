# SPDX-License-Identifier: Apache-2.0
"""Step caching: denoise steps that are not computed, because the prediction of a step before still
stands for them.

After TeaCache (Liu et al. 2024, arXiv 2411.19108): how much a network's prediction changes from one
step to the next follows how much its time embedding does. These changes are summed since the last
computed step; while the sum stays below a request's threshold, that step's prediction is taken
again. Unlike TeaCache there is no polynomial, which is fitted to one checkpoint: changes are
counted in their mean over the schedule. And the prediction is kept instead of a residual.

A request's steps are chosen before its first, from its timesteps alone: ranks agree on them, and
nothing waits for the device in between. Why not diffusers' caches (`diffusers.hooks`): they replace
forwards of diffusers' transformer classes, and First Block Cache compares tensors on the host at
each step.
Held by tests/model_executor/test_step_cache.py.
"""

# S steps, D channels of a time embedding

from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
import torch

StepCache = Annotated[float, msgspec.Meta(gt=0, le=100)]
"""A request's threshold, in mean changes of its schedule: 2 computes about every second step, 3
every third.
"""

_ROUNDING = 1e-3
"""Share of a threshold that changes may miss because they are rounded."""


def computed_steps(
    embeddings_SD: torch.Tensor, threshold: float, fixed: Collection[int] = ()
) -> tuple[bool, ...]:
    """Whether each step is computed. The first and the last are, and those of `fixed`.

    embeddings: the time embedding of each step, any float type; a change is the mean of its
    absolute difference to that of the step before, over the mean of that one's absolute values.
    threshold: see `StepCache`.
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
    """A result's entry: the threshold, and the share of its steps that were computed.

    Nothing without a threshold.
    """
    if threshold is None:
        return {}
    share = sum(computed) / len(computed) if computed else 1.0
    return {"step_cache": {"threshold": threshold, "computed_share": round(share, 4)}}
