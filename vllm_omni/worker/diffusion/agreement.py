# SPDX-License-Identifier: Apache-2.0
"""`RankAgreement`: decisions that must be the same on all ranks of an engine, and the messages that
the ranks exchange to agree.

All ranks receive the same batches, but a single rank may refuse a request, for example for lack of
memory. A forward pass contains collectives, so all ranks must run it for the same requests.
Therefore, the ranks agree on each request before its first step: tensor-parallel ranks use a gloo
all-reduce, and pipeline stages send a mask along with the hidden states. This module does not
depend on a model.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.lora.request import LoRARequest

from vllm_omni.model_executor.layers.lora.store import NoAdapters
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed

_MASK = "alive"
_REFUSED, _WAITING = -1, -2


class RankAgreement:
    """Agreement between the ranks of one engine.

    Args:
        tensor: vLLM's group coordinator for the ranks that share layers.
        world: vLLM's group coordinator for all ranks.
    """

    def __init__(self, tensor: Any, world: Any) -> None:
        self._tensor = tensor
        self._world = world
        self.several: bool = tensor.world_size > 1
        """Whether several ranks share the layers of a stage and therefore have to agree."""

    # within a step

    def read_mask(
        self, received: Mapping[str, torch.Tensor], states: Sequence[RequestState]
    ) -> list[int]:
        """Return the flag that the previous stage has sent for each request in `states`: a chunk
        index, or a negative code.
        """
        return [int(flag) for flag in received[_MASK].tolist()[: len(states)]]

    def indices(self, states: Sequence[RequestState], mask: Sequence[int] | None) -> dict[str, int]:
        """Return the chunk indices of the requests that take part in this step, keyed by request
        id. The result is empty on the first stage.
        """
        if mask is None:
            return {}
        return {
            state.request_id: flag for state, flag in zip(states, mask, strict=True) if flag >= 0
        }

    def waiting(self, states: Sequence[RequestState], mask: Sequence[int]) -> list[RequestState]:
        """Return the requests that an earlier stage holds back."""
        return [state for state, flag in zip(states, mask, strict=True) if flag == _WAITING]

    def alive(
        self,
        states: Sequence[RequestState],
        waiting: Sequence[RequestState],
        mask: Sequence[int] | None,
    ) -> list[RequestState]:
        """Return the requests that take part in the collectives of this step.

        A request takes part in the step unless a rank has refused the request or holds it back.
        Refused requests are marked as failed.

        Args:
            states: The requests of the batch.
            waiting: Requests that this rank holds back.
            mask: Flags from the previous stage for `states`; None on the first stage.

        Raises:
            RuntimeError: This stage must refuse a request that an earlier stage has accepted.
        """
        fine = [state.failure is None for state in states]
        if self._tensor.world_size > 1 and any(
            state.chunk is None or state.chunk.step == 0 for state in states
        ):
            fine = self._everywhere(fine)
        if mask is not None:
            wanted = [flag >= 0 for flag in mask]
            # A chunk that has failed in the meantime because its predecessor failed still takes
            # part. Its result is discarded.
            able = [
                good or state.chunk is not None for state, good in zip(states, fine, strict=True)
            ]
            if any(want and not mine for want, mine in zip(wanted, able, strict=True)):
                # The hidden states of the request have arrived in one tensor with those of other
                # requests, so this rank cannot skip the request.
                raise RuntimeError(
                    "an earlier pipeline stage accepted a request that this stage had to refuse"
                )
            fine = wanted
        alive = []
        for state, good in zip(states, fine, strict=True):
            if state in waiting:
                continue
            if good:
                alive.append(state)
            elif state.failure is None:
                state.failure = RequestFailed(
                    "engine_error", "another rank could not accept this request"
                )
        return alive

    def mask(
        self,
        states: Sequence[RequestState],
        alive: Sequence[RequestState],
        waiting: Sequence[RequestState],
    ) -> dict[str, torch.Tensor]:
        """Return the flags of `states` for the next stage, as a small int32 CPU tensor.

        The flag of a request is its chunk index if its hidden states are sent; otherwise, it is the
        code for a waiting or refused request. The length of the tensor is one more than a multiple
        of the tensor-parallel size. If the length were divisible by this size, vLLM would send the
        tensor in shards, which requires a device tensor.
        """
        flags = [
            state.index if state in alive else _WAITING if state in waiting else _REFUSED
            for state in states
        ]
        padding = -len(flags) % self._tensor.world_size + 1
        return {_MASK: torch.tensor([*flags, *([_REFUSED] * padding)], dtype=torch.int32)}

    def agree(self, state: RequestState) -> None:
        """Fail a chunk on all tensor-parallel ranks if it has failed on any of them
        (collective).
        """
        if not self.all_fine(state.failure is None) and state.failure is None:
            state.failure = RequestFailed(
                "engine_error", "another tensor-parallel rank failed on this chunk"
            )

    def all_fine(self, fine: bool) -> bool:
        """Return whether `fine` is true on every tensor-parallel rank (collective)."""
        return fine if self._tensor.world_size == 1 else self._everywhere([fine])[0]

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise minimum of `values` over the tensor-parallel ranks
        (collective).
        """
        if self._tensor.world_size == 1 or not values:
            return list(values)
        least = torch.tensor(values, dtype=torch.int32)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._tensor.cpu_group)
        return [int(value) for value in least.tolist()]

    def _everywhere(self, fine: Sequence[bool]) -> list[bool]:
        return [bool(flag) for flag in self.least(fine)]

    # for adapters

    def add_adapter(self, adapters: NoAdapters, request: LoRARequest) -> bool:
        """Add a LoRA adapter on all ranks or on none (collective).

        If loading fails, only the last rank raises an exception, because vLLM's executor reads
        replies in rank order and stops at the first error.

        Raises:
            ValueError: A rank could not load the adapter. The message is one line.
        """
        added, own_error = False, None
        try:
            added = adapters.add_adapter(request)
        except Exception as error:
            own_error = str(error)
        problem = self._first_error(own_error)
        if problem is None:
            return added
        if added:
            adapters.remove(request.lora_int_id)
        if self._world.rank_in_group == self._world.world_size - 1:
            raise ValueError(problem)
        return False

    def _first_error(self, own: str | None) -> str | None:
        """Return the error of the first rank that has an error, or None (collective)."""
        if self._world.world_size == 1:
            return own
        everywhere: list[str | None] = [None] * self._world.world_size
        dist.all_gather_object(everywhere, own, group=self._world.cpu_group)
        return next((error for error in everywhere if error is not None), None)

    # for the session store

    def budget(self, budget_bytes: int, session_bytes: int) -> int:
        """Return this rank's memory budget for sessions, limited by the rank with the least memory
        (collective).

        With this budget, all ranks admit the same number of sessions of the largest shape.

        Args:
            budget_bytes: Memory available for sessions on this rank.
            session_bytes: Memory of one session of the largest shape on this rank.
        """
        if self._world.world_size == 1:
            return budget_bytes
        # `session_bytes` is 0 on a rank of a VAE stage that does not decode.
        own = budget_bytes / session_bytes if session_bytes else float("inf")
        sessions = torch.tensor([own], dtype=torch.float64)
        dist.all_reduce(sessions, op=dist.ReduceOp.MIN, group=self._world.cpu_group)
        return int(sessions.item() * session_bytes) if session_bytes else 0

    def clock(self) -> float:
        """Return the time in seconds.

        With several ranks, the returned time is constant, so no session ever counts as idle. All
        ranks must evict the same sessions, but their clocks show different times.
        """
        return time.monotonic() if self._world.world_size == 1 else 0.0
