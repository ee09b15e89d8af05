# SPDX-License-Identifier: Apache-2.0
"""`RankAgreement`: decisions that all ranks of one engine must take alike, and the small messages that carry them.

Every rank sees the same batches, but each may refuse a request by itself (its memory, its inputs). A forward contains
collectives, so all ranks must run it for the same requests. Before a request's first step they agree: tensor-parallel
ranks by a reduction over gloo, pipeline stages by a mask that travels with the hidden states. Knows no model.
Held by tests/engine/test_parallel.py and tests/worker/test_diffusion_model_runner.py.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.lora.request import LoRARequest

from vllm_omni.model_executor.lora.store import NoAdapters
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed

_MASK = "alive"
_REFUSED, _WAITING = -1, -2


class RankAgreement:
    """tensor, world: vLLM's group coordinators of the ranks that share layers, and of all."""

    def __init__(self, tensor: Any, world: Any) -> None:
        self._tensor = tensor
        self._world = world
        self.several: bool = tensor.world_size > 1
        """Whether there is anything to agree on within a stage: ranks share its layers."""

    # within a step

    def read_mask(self, received: Mapping[str, torch.Tensor], states: Sequence[RequestState]) -> list[int]:
        """The previous stage's flag for each of `states`: the chunk index if it takes part, else a negative code."""
        return [int(flag) for flag in received[_MASK].tolist()[: len(states)]]

    def indices(self, states: Sequence[RequestState], mask: Sequence[int] | None) -> dict[str, int]:
        """Request id -> chunk index, for the requests that take part; empty on the first stage."""
        if mask is None:
            return {}
        return {state.request_id: flag for state, flag in zip(states, mask, strict=True) if flag >= 0}

    def waiting(self, states: Sequence[RequestState], mask: Sequence[int]) -> list[RequestState]:
        """The requests that an earlier stage holds back."""
        return [state for state, flag in zip(states, mask, strict=True) if flag == _WAITING]

    def alive(
        self, states: Sequence[RequestState], waiting: Sequence[RequestState], mask: Sequence[int] | None
    ) -> list[RequestState]:
        """The requests that take part in this step's collectives: no rank has refused them or holds them back.

        mask: the previous stage's flags for `states`; None on the first stage. Refused requests are marked as failed.
        """
        fine = [state.failure is None for state in states]
        if self._tensor.world_size > 1 and any(state.chunk is None or state.chunk.step == 0 for state in states):
            fine = self._everywhere(fine)
        if mask is not None:
            wanted = [flag >= 0 for flag in mask]
            # A chunk that has failed since (with a chunk before it) still takes part; its result is discarded.
            able = [good or state.chunk is not None for state, good in zip(states, fine, strict=True)]
            if any(want and not mine for want, mine in zip(wanted, able, strict=True)):
                # Hidden states of that request have arrived inside its group: this rank cannot leave it out.
                raise RuntimeError("an earlier pipeline stage accepted a request that this stage had to refuse")
            fine = wanted
        alive = []
        for state, good in zip(states, fine, strict=True):
            if state in waiting:
                continue
            if good:
                alive.append(state)
            elif state.failure is None:
                state.failure = RequestFailed("engine_error", "another rank could not take this request")
        return alive

    def mask(
        self, states: Sequence[RequestState], alive: Sequence[RequestState], waiting: Sequence[RequestState]
    ) -> dict[str, torch.Tensor]:
        """The flags of `states` for the next stage, as a small int32 CPU tensor: chunk index (its hidden states are
        sent), waiting, or refused.

        Its length is one more than a multiple of the tensor-parallel size: vLLM sends tensors of a divisible length
        in shards, which needs a device tensor.
        """
        flags = [state.index if state in alive else _WAITING if state in waiting else _REFUSED for state in states]
        padding = -len(flags) % self._tensor.world_size + 1
        return {_MASK: torch.tensor([*flags, *([_REFUSED] * padding)], dtype=torch.int32)}

    def agree(self, state: RequestState) -> None:
        """Before an operation of all tensor-parallel ranks: a chunk that has failed on one rank fails on all."""
        if not self.all_fine(state.failure is None) and state.failure is None:
            state.failure = RequestFailed("engine_error", "another tensor-parallel rank failed on this chunk")

    def all_fine(self, fine: bool) -> bool:
        """Whether `fine` is true on every tensor-parallel rank."""
        return fine if self._tensor.world_size == 1 else self._everywhere([fine])[0]

    def _everywhere(self, fine: Sequence[bool]) -> list[bool]:
        flags = torch.tensor(fine, dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._tensor.cpu_group)
        return [bool(flag) for flag in flags.tolist()]

    # for adapters

    def add_adapter(self, adapters: NoAdapters, request: LoRARequest) -> bool:
        """Add an adapter on all ranks or on none (collective). Raises ValueError of one line.

        The last rank raises for all: vLLM's executor reads replies in order of rank, and none behind an error.
        """
        added, own_error = False, None
        try:
            added = adapters.add(request)
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
        """The error of the first rank that has one (collective)."""
        if self._world.world_size == 1:
            return own
        everywhere: list[str | None] = [None] * self._world.world_size
        dist.all_gather_object(everywhere, own, group=self._world.cpu_group)
        return next((error for error in everywhere if error is not None), None)

    # for the session store

    def budget(self, budget_bytes: int, session_bytes: int) -> int:
        """Every rank admits as many sessions of the largest shape as the tightest rank can hold."""
        if self._world.world_size == 1:
            return budget_bytes
        own = budget_bytes / session_bytes if session_bytes else float("inf")  # 0: a VAE rank that does not decode
        sessions = torch.tensor([own], dtype=torch.float64)
        dist.all_reduce(sessions, op=dist.ReduceOp.MIN, group=self._world.cpu_group)
        return int(sessions.item() * session_bytes) if session_bytes else 0

    def clock(self) -> float:
        """Seconds; on several ranks eviction may not differ, so nothing there is ever idle by the clock alone."""
        return time.monotonic() if self._world.world_size == 1 else 0.0
