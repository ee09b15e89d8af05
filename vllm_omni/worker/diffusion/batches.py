# SPDX-License-Identifier: Apache-2.0
"""Step batching: which of the scheduled requests share one forward.

Requests whose model says they may (`batch_key`) and whose adapters are the same share one, whatever denoise step each
is at. Order is the scheduler's, so every rank builds the same batches. Held by tests/worker/test_step_batch.py.
"""

from collections.abc import Hashable, Sequence

from vllm_omni.model_executor.interfaces import SupportsStepExecution
from vllm_omni.model_executor.requests import RequestState


def group_states(model: SupportsStepExecution, states: Sequence[RequestState], limit: int) -> list[list[RequestState]]:
    """Split `states`, which all have a chunk, into batches of equal `batch_key` and adapters, order kept.

    limit: members of a batch at most.
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
