# SPDX-License-Identifier: Apache-2.0
"""`RankAgreement` with pretended groups: what each rank concludes from what the others say."""

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
    """Takes the place of `all_reduce`: the other rank's values, by the reduction asked for;
    notes the groups used.
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
    """step None: without a chunk."""
    state = RequestState(name, DiffusionParams(session_id="s"), {}, index=index, failure=failure)
    state.chunk = None if step is None else SimpleNamespace(step=step)  # type: ignore[assignment]
    return state


def names(states: list[RequestState]) -> str:
    return "".join(state.request_id for state in states)


def told(state: RequestState) -> tuple[str, str] | None:
    return None if state.failure is None else (state.failure.code, state.failure.message)


def test_one_rank_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent; whoever waits takes no part and has not failed, wherever it stands in the
    batch.
    """
    others = Others(monkeypatch)
    good, bad, late = request("a"), request("b", None, OWN), request("c", None)
    assert names(ranks().alive([good, bad, late], [late], None)) == "a"
    assert names(ranks().alive([late, bad, good], [late], None)) == "a"
    assert (told(good), bad.failure, told(late)) == (None, OWN, None) and others.requested == []


def test_what_any_tensor_parallel_rank_refuses_all_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a first step, in one reduction for the whole batch, on the host's group; with the
    reason it has here.
    """
    others = Others(monkeypatch, [1, 0, 1, 1])
    states = [request("a"), request("b"), request("c", None, OWN), request("d", 3)]
    assert names(ranks(tensor=2).alive(states, [], None)) == "ad"
    assert others.requested == [("tp", [1, 1, 0, 1])]
    assert [told(state) for state in states] == [None, ELSEWHERE, ("capacity", "full"), None]


@pytest.mark.parametrize(("steps", "requests"), [([1, 2], 0), ([1, 0], 1), ([None, 2], 1)])
def test_ranks_request_each_other_only_before_a_first_step(
    monkeypatch: pytest.MonkeyPatch, steps: list[int | None], requests: int
) -> None:
    """Later a request that one of them had to leave would have ended already."""
    others = Others(monkeypatch, *([[1, 1]] * requests))
    states = [request(name, step) for name, step in zip("ab", steps, strict=True)]
    assert (
        names(ranks(tensor=2).alive(states, [], None)) == "ab" and len(others.requested) == requests
    )


def test_a_later_stage_takes_whom_the_one_before_took() -> None:
    """One that has failed here since takes part for nothing; one that was refused there has
    failed here too.
    """
    states = [request("a"), request("b", 2, OWN), request("c"), request("d", None)]
    later = ranks()
    mask = [0, 7, -1, -2]
    assert later.indices(states, mask) == {"a": 0, "b": 7} and later.indices(states, None) == {}
    waiting = later.waiting(states, mask)
    assert names(waiting) == "d" and names(later.alive(states, waiting, mask)) == "ab"
    assert [told(state) for state in states] == [None, ("capacity", "full"), ELSEWHERE, None]


def test_a_stage_that_cannot_take_what_arrives_stops_the_engine() -> None:
    """Its hidden states are inside the batch: no rank could leave it out."""
    text = "^an earlier pipeline stage accepted a request that this stage had to refuse$"
    with pytest.raises(RuntimeError, match=text):
        ranks().alive([request("a"), request("b", None, OWN)], [], [0, 0])
    assert names(ranks().alive([request("a"), request("b", None, OWN)], [], [0, -1])) == "a"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", range(6))
def test_a_mask_arrives_and_divides_over_no_ranks(size: int, count: int) -> None:
    """The chunk's index, or who waits, or who is refused; what does not divide travels whole."""
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


def test_before_something_shared_one_failure_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode that tensor-parallel ranks do together; nobody's own reason is replaced."""
    others = Others(monkeypatch, [1], [0], [1], [0])
    fine, theirs, mine, both = (
        request("a"),
        request("b"),
        request("c", 0, OWN),
        request("d", 0, OWN),
    )
    for state in (fine, theirs, mine, both):
        ranks(tensor=2).agree(state)
    assert told(fine) is None and mine.failure is both.failure is OWN
    assert told(theirs) == ("engine_error", "another tensor-parallel rank failed on this chunk")
    assert others.requested == [("tp", [1]), ("tp", [1]), ("tp", [0]), ("tp", [0])]
    ranks().agree(alone := request("e"))
    ranks().agree(request("f", 0, OWN))
    assert told(alone) is None and len(others.requested) == 4
    assert ranks().all_fine(True) and not ranks().all_fine(False)


def test_the_tightest_rank_sets_the_number_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In sessions, not in bytes: a rank's share of one may be larger.

    A rank that holds none of it has no say.
    """
    others = Others(monkeypatch, [2.5], [19.0], [3.0], [float("inf")])
    assert ranks(world=2).budget(1000, 100) == 250
    assert ranks(world=2).budget(1000, 100) == 1000
    assert ranks(world=2).budget(1000, 0) == ranks(world=2).budget(1000, 0) == 0
    assert others.requested == [("all", [10.0])] * 2 + [("all", [float("inf")])] * 2
    assert ranks().budget(1000, 0) == 1000 and len(others.requested) == 4


def test_time_stands_still_where_ranks_must_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks nothing is ever idle by the clock alone."""
    monkeypatch.setattr("time.monotonic", lambda: 17.0)
    assert ranks(tensor=1, world=1).clock() == 17.0 and ranks(world=2).clock() == 0.0
