# SPDX-License-Identifier: Apache-2.0
"""Step caching: skips denoise steps and reuses the prediction of an earlier step.

The method follows TeaCache (Liu et al. 2024, arXiv 2411.19108): between two steps, a network's
prediction changes about as much as its time embedding. The changes in the embedding since the last
computed step are summed. While the sum is below the request's threshold, the prediction from the
last computed step is reused. There are two differences from TeaCache. Changes are divided by their
mean over the schedule rather than rescaled with TeaCache's polynomial, which must be fitted to each
checkpoint. The cache contains the prediction instead of a residual.

Which steps are computed is decided before the first step and depends only on the timesteps and the
request's threshold. All ranks therefore compute the same steps, and the host does not wait for the
device. diffusers' caches (`diffusers.hooks`) are not suitable, because they replace forward passes
of diffusers' classes, and First Block Cache compares tensors on the host in each step.
"""

# S steps, D channels of a time embedding

from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
import torch

StepCache = Annotated[float, msgspec.Meta(gt=0, le=100)]
"""Threshold of a request, relative to the mean change of the time embedding between two steps of
its schedule. For example, about every second step is computed with a threshold of 2, and about
every third with a threshold of 3.
"""

_ROUNDING = 1e-3
"""Tolerance for rounding errors, as a fraction of the threshold."""


def computed_steps(
    embeddings_SD: torch.Tensor, threshold: float, fixed: Collection[int] = ()
) -> tuple[bool, ...]:
    """Return, for each step, whether it is computed. The first and last steps are always computed.

    Args:
        embeddings_SD: Time embedding of each step, any float dtype. The change of a step is the
            mean absolute difference from the previous embedding, divided by the mean absolute value
            of the previous embedding.
        threshold: Threshold of the request (`StepCache`).
        fixed: Indices of additional steps that are always computed.
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
    """Return the step-caching metadata of a result: the threshold and the fraction of steps that
    are computed.

    The metadata is empty for a request without a threshold.
    """
    if threshold is None:
        return {}
    share = sum(computed) / len(computed) if computed else 1.0
    return {"step_cache": {"threshold": threshold, "computed_share": round(share, 4)}}
