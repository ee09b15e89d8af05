# SPDX-License-Identifier: Apache-2.0
"""Step batching: group the scheduled requests that share a forward pass.

Requests with the same `batch_key` of the model and the same LoRA adapters share one, at whatever
denoise step each is. The order is the scheduler's, so every rank builds the same batches.
"""

from collections.abc import Hashable, Sequence

from vllm_omni.model_executor.interfaces import SupportsStepExecution
from vllm_omni.model_executor.requests import RequestState


def group_states(model: SupportsStepExecution, states: Sequence[RequestState], limit: int) -> list[list[RequestState]]:
    """Split requests into batches of equal `batch_key` and adapters, in order.

    Args:
        model: Defines `batch_key`.
        states: Requests with a chunk.
        limit: Maximum size of a batch.
    """
    groups: list[list[RequestState]] = []
    open_group: dict[Hashable, list[RequestState]] = {}
    for state in states:
        assert state.chunk is not None
        key = model.batch_key(state.chunk), state.chunk.adapters
        group = open_group.get(key)
        if group is None or len(group) >= limit:
            group = open_group[key] = []
            groups.append(group)
        group.append(state)
    return groups
