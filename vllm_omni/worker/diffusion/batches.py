# SPDX-License-Identifier: Apache-2.0
"""Step batching: which of the scheduled requests share one forward.

Requests whose model says they may (`batch_key`) and whose adapters are the same share one, whatever denoise step each
is at. Order is the scheduler's, so every rank builds the same batches. Held by tests/worker/test_step_batch.py.
"""

from collections.abc import Hashable, Sequence

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution


def group_requests(
    model: SupportsStepExecution, requests: Sequence[DiffusionRequest], limit: int
) -> list[list[DiffusionRequest]]:
    """Split `requests` into batches of equal `batch_key` and adapters and at most `limit` members, order kept."""
    groups: list[list[DiffusionRequest]] = []
    open_group: dict[Hashable, list[DiffusionRequest]] = {}
    for request in requests:
        key = model.batch_key(request), request.adapters
        group = open_group.get(key)
        if group is None or len(group) >= limit:
            group = open_group[key] = []
            groups.append(group)
        group.append(request)
    return groups
