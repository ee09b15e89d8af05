# SPDX-License-Identifier: Apache-2.0
"""Tests of `RankAgreement` with mocked process groups: what a rank decides, given the other ranks'
values.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.agreement import RankAgreement

ELSEWHERE = ("engine_error", "another rank could not accept this request")
OWN = RequestFailed("capacity", "full")


class Others:
    """A mock of `all_reduce` that combines this rank's values with given values from other ranks
    and records the process groups.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *responses: list[float]) -> None:
        self.responses, self.requested = list(responses), list[tuple[Any, list[float]]]()
        monkeypatch.setattr(dist, "all_reduce", self._reduce)

    def _reduce(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MIN and tensor.dtype in (torch.int32, torch.float64)
        self.requested.append((group, tensor.tolist()))
        torch.minimum(tensor, torch.tensor(self.responses.pop(0), dtype=tensor.dtype), out=tensor)


def ranks(tensor: int = 1, world: int = 1) -> RankAgreement:
    groups = (
        SimpleNamespace(world_size=size, cpu_group=name)
        for size, name in ((tensor, "tp"), (world, "all"))
    )
    return RankAgreement(*groups)


def request(
    name: str, step: int | None = 0, failure: RequestFailed | None = None, index: int = 0
) -> RequestState:
    """Return a request's state. If `step` is None, the request has no chunk."""
    state = RequestState(name, DiffusionParams(session_id="s"), {}, index=index, failure=failure)
    state.chunk = None if step is None else SimpleNamespace(step=step)  # type: ignore[assignment]
    return state


def names(states: list[RequestState]) -> str:
    return "".join(state.request_id for state in states)


def failure_of(state: RequestState) -> tuple[str, str] | None:
    return None if state.failure is None else (state.failure.code, state.failure.message)


def test_a_single_rank_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank sends nothing.

    A waiting request is neither accepted nor failed, wherever it is in the batch.
    """
    others = Others(monkeypatch)
    good, bad, late = request("a"), request("b", None, OWN), request("c", None)
    assert names(ranks().alive([good, bad, late], [late], None)) == "a"
    assert names(ranks().alive([late, bad, good], [late], None)) == "a"
    assert (failure_of(good), bad.failure, failure_of(late)) == (
        None,
        OWN,
        None,
    ) and others.requested == []


def test_a_refusal_by_one_tensor_parallel_rank_applies_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If one tensor-parallel rank refuses a request, all ranks refuse it.

    The rank that refused the request keeps its own reason. Before a request's first step, one
    reduction over the CPU group is sufficient for the whole batch.
    """
    others = Others(monkeypatch, [1, 0, 1, 1])
    states = [request("a"), request("b"), request("c", None, OWN), request("d", 3)]
    assert names(ranks(tensor=2).alive(states, [], None)) == "ad"
    assert others.requested == [("tp", [1, 1, 0, 1])]
    assert [failure_of(state) for state in states] == [None, ELSEWHERE, ("capacity", "full"), None]


@pytest.mark.parametrize(("steps", "requests"), [([1, 2], 0), ([1, 0], 1), ([None, 2], 1)])
def test_ranks_reduce_only_before_a_first_step(
    monkeypatch: pytest.MonkeyPatch, steps: list[int | None], requests: int
) -> None:
    """Ranks run a reduction only before a request's first step. A later step needs none, because a
    refused request never reaches its second step.
    """
    others = Others(monkeypatch, *([[1, 1]] * requests))
    states = [request(name, step) for name, step in zip("ab", steps, strict=True)]
    assert (
        names(ranks(tensor=2).alive(states, [], None)) == "ab" and len(others.requested) == requests
    )


def test_a_later_stage_accepts_the_requests_of_the_earlier_stage() -> None:
    """A later pipeline stage runs the requests that the earlier stage accepted.

    A request that later fails on this stage still runs its remaining steps. A request that an
    earlier stage has refused fails on this stage too.
    """
    states = [request("a"), request("b", 2, OWN), request("c"), request("d", None)]
    later = ranks()
    mask = [0, 7, -1, -2]
    assert later.indices(states, mask) == {"a": 0, "b": 7} and later.indices(states, None) == {}
    waiting = later.waiting(states, mask)
    assert names(waiting) == "d" and names(later.alive(states, waiting, mask)) == "ab"
    assert [failure_of(state) for state in states] == [None, ("capacity", "full"), ELSEWHERE, None]


def test_refusing_a_request_of_an_earlier_stage_stops_the_engine() -> None:
    """If a stage must refuse a request that an earlier stage has accepted, it stops the engine.

    The request's hidden states are part of the batch that the stage receives, so the stage cannot
    omit the request.
    """
    text = "^an earlier pipeline stage accepted a request that this stage had to refuse$"
    with pytest.raises(RuntimeError, match=text):
        ranks().alive([request("a"), request("b", None, OWN)], [], [0, 0])
    assert names(ranks().alive([request("a"), request("b", None, OWN)], [], [0, -1])) == "a"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_mask_is_sent_unsplit(size: int, count: int) -> None:
    """vLLM sends the mask to the next stage in one piece, because the mask's length is not
    divisible by the number of ranks.

    For each request, the mask contains the chunk index, or a marker if the request is waiting or
    refused.
    """
    states = [request(name, index=index + 3) for index, name in enumerate("abcde"[:count])]
    alive, waiting = states[::3], states[1::3]
    message = ranks(tensor=size).mask(states, alive, waiting)
    (flags,) = message.values()
    assert flags.dtype == torch.int32 and flags.device.type == "cpu"
    assert (
        len(flags) > count and (size == 1 or len(flags) % size == 1) and len(flags) - count <= size
    )
    read = ranks().read_mask(message, states)
    assert read == [3, -2, -1, 6, -2][:count]
    assert all(type(flag) is int for flag in read)


def test_a_failure_before_a_shared_decode_applies_to_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If one rank fails before a decode that tensor-parallel ranks share, the chunk fails on all
    ranks.

    A rank that has its own reason for the failure keeps that reason.
    """
    others = Others(monkeypatch, [1], [0], [1], [0])
    fine, theirs, mine, both = (
        request("a"),
        request("b"),
        request("c", 0, OWN),
        request("d", 0, OWN),
    )
    for state in (fine, theirs, mine, both):
        ranks(tensor=2).agree(state)
    assert failure_of(fine) is None and mine.failure is both.failure is OWN
    assert failure_of(theirs) == (
        "engine_error",
        "another tensor-parallel rank failed on this chunk",
    )
    assert others.requested == [("tp", [1]), ("tp", [1]), ("tp", [0]), ("tp", [0])]
    ranks().agree(alone := request("e"))
    ranks().agree(request("f", 0, OWN))
    assert failure_of(alone) is None and len(others.requested) == 4
    assert ranks().all_fine(True) and not ranks().all_fine(False)


def test_the_rank_with_least_room_sets_the_number_of_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank with room for the fewest sessions determines the number of sessions.

    Ranks compare numbers of sessions rather than bytes, because their shares of a session differ in
    size. A rank that holds no share of a session does not limit the number of sessions.
    """
    others = Others(monkeypatch, [2.5], [19.0], [3.0], [float("inf")])
    assert ranks(world=2).budget(1000, 100) == 250
    assert ranks(world=2).budget(1000, 100) == 1000
    assert ranks(world=2).budget(1000, 0) == ranks(world=2).budget(1000, 0) == 0
    assert others.requested == [("all", [10.0])] * 2 + [("all", [float("inf")])] * 2
    assert ranks().budget(1000, 0) == 1000 and len(others.requested) == 4


def test_several_ranks_use_a_constant_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks use a constant clock, so no rank evicts a session based on its local time."""
    monkeypatch.setattr("time.monotonic", lambda: 17.0)
    assert ranks(tensor=1, world=1).clock() == 17.0 and ranks(world=2).clock() == 0.0
