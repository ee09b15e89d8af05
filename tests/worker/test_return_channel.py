# SPDX-License-Identifier: Apache-2.0
"""`ReturnChannel`: its process groups and messages with a mock of torch.distributed, and results on
real ranks.
"""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ports import port_for_a_server
from helpers.rank_processes import run_ranks

from vllm_omni.worker.diffusion import link
from vllm_omni.worker.diffusion.link import ReturnChannel, connect_forward

FIRST, SECOND, VAE = (0, 2, 4), (1, 3, 5), 6
COLUMNS = [FIRST, SECOND, FIRST, SECOND, FIRST, SECOND, FIRST]
"""Column of each rank: three stages of two ranks, and a rank that only decodes."""
META = torch.device("meta")
CPU = torch.device("cpu")


class Work:
    """A mock transfer that stays incomplete until the test completes it."""

    completed = False

    def is_completed(self) -> bool:
        return self.completed


class Group:
    """A mock of torch.distributed with seven ranks, as seen by code that runs on `rank`."""

    def __init__(self) -> None:
        self.rank = 0
        self.calls: list[Any] = []
        self.works: list[Work] = []

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return len(COLUMNS)

    def all_gather_object(self, found: list[Any], mine: Any) -> None:
        assert len(found) == len(COLUMNS)
        assert mine == list(COLUMNS[self.rank])
        found[:] = [list(column) for column in COLUMNS]

    def new_group(self, ranks: list[int], *, backend: str) -> tuple[int, ...]:
        self.calls.append((backend, ranks))
        return tuple(ranks)

    def send(self, token: torch.Tensor, *, dst: int, group: Any) -> None:
        self.calls.append(("send", dst, group, token.numel(), token.device.type))

    def recv(self, token: torch.Tensor, *, src: int, group: Any) -> None:
        self.calls.append(("recv", src, group, token.numel(), token.device.type))

    def isend(self, message: torch.Tensor, *, dst: int, group: Any) -> Work:
        self.calls.append(weakref.ref(message))
        self.works.append(Work())
        return self.works[-1]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    monkeypatch.setattr(link, "dist", made)
    return made


def channel(group: Group, rank: int, device: torch.device = CPU) -> ReturnChannel:
    group.rank = rank
    return ReturnChannel(COLUMNS[rank], device)


@pytest.mark.parametrize(
    ("rank", "connected"),
    [
        (0, [("recv", 4, (0, 4))]),
        (2, [("recv", 4, (2, 4))]),
        (4, [("send", 0, (0, 4)), ("send", 2, (2, 4))]),
        (3, [("recv", 5, (3, 5))]),
        (5, [("send", 1, (1, 5)), ("send", 3, (3, 5))]),
        (VAE, []),
    ],
)
def test_every_rank_creates_all_groups_and_connects_its_own(
    group: Group, rank: int, connected: list[Any]
) -> None:
    """Every rank creates all groups in the same order, as `new_group` requires, but connects only
    its own groups.

    The last stage sends one element to each earlier stage.
    """
    made = channel(group, rank, META)
    assert made.is_last == (rank in (4, 5))
    groups = [("gloo", pair) for pair in ([0, 4], [2, 4], [1, 5], [3, 5])]
    assert group.calls == groups + [(*one, 1, "meta") for one in connected]


@pytest.mark.parametrize(
    ("first", "last", "calls"),
    [
        (True, False, ["send"]),
        (False, False, ["recv", "send"]),
        (False, True, ["recv"]),
        (True, True, []),
    ],
)
def test_stages_are_connected_forward(
    group: Group, first: bool, last: bool, calls: list[str]
) -> None:
    """Stages connect in the direction in which vLLM sends messages, so ranks cannot deadlock by
    waiting for each other.
    """
    pp: Any = SimpleNamespace(
        is_first_rank=first, is_last_rank=last, prev_rank=7, next_rank=9, device_group="stages"
    )
    connect_forward(pp, META)
    peers = {"recv": 7, "send": 9}
    assert group.calls == [(call, peers[call], "stages", 1, "meta") for call in calls]


def batch() -> list[Any]:
    """Return a batch of two requests."""
    return [SimpleNamespace(request_id=name, step=4, num_steps=4) for name in ("a", "b")]


def test_a_message_lives_until_every_stage_has_it(group: Group) -> None:
    """The last stage keeps a message in memory until all transfers of that message have
    completed.
    """
    last = channel(group, 4)
    group.calls.clear()
    for _ in range(2):
        last.send(batch(), [True, True], [torch.zeros(2), torch.zeros(3)])
    first, second = group.calls[0], group.calls[2]
    assert [message.shape for message in (first(), second())] == [(7,)] * 2
    group.works[0].completed = group.works[3].completed = True
    last.send(batch(), [True, True], [torch.zeros(2), torch.zeros(3)])
    assert first() is not None, "one of two stages still receives it"
    for work in group.works[:4]:
        work.completed = True
    last.send(batch(), [True, True], [torch.zeros(2), torch.zeros(3)])
    assert first() is None
    assert second() is None
    assert group.calls[-1]() is not None


TWO_STAGES = ((0, 2), (1, 3))
"""Columns of two stages with two ranks each. Rank 4 only decodes."""


class Growing:
    """A mocked model with bf16 latents. In batch n, the first request's latents have n + 1
    elements, and the second request's have 2.
    """

    def latents(self, request: Any) -> torch.Tensor:
        shape = (request.batch + 1, 1) if request.request_id.startswith("first") else (1, 2)
        return torch.full(shape, request.value, dtype=torch.bfloat16)


def batch_of(number: int, value: float) -> list[Any]:
    return [
        SimpleNamespace(
            request_id=f"{name} {number}", batch=number, value=value + index, step=1, num_steps=1
        )
        for index, name in enumerate(("first", "second"))
    ]


def rank_of_a_column(rank: int, address: str) -> None:
    """Send or receive three batches of results on one rank.

    `listen` posts the receives, and `drain` applies all results up to the newest requested one.
    """
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=5)
    column = TWO_STAGES[rank % 2]
    channel, model = ReturnChannel(column, torch.device("cpu")), Growing()
    assert channel.is_last == (rank in (2, 3))
    batches = [batch_of(number, 10.0 * number + 100 * column[1]) for number in range(3)]
    if channel.is_last:
        for batch in batches:
            channel.send(
                batch, [True, batch[0].batch != 1], [model.latents(request) for request in batch]
            )
    elif rank != 4:
        taken: list[Any] = []
        irecv, posted = dist.irecv, []
        dist.irecv = lambda *args, **kwargs: posted.append(1) or irecv(*args, **kwargs)
        for number, batch in enumerate(batches):
            channel.expect(batch)
            assert len(posted) == number, "a receive was posted before hidden states were sent"
            channel.listen(model)  # type: ignore[arg-type]
        for requested, number_taken in (
            ([], 0),
            (["second 1", "other"], 4),
            (["first 0"], 4),
            (["first 2"], 6),
        ):
            channel.drain(
                requested, lambda request, ok, latents: taken.append((request, ok, latents))
            )
            assert len(taken) == number_taken
        assert [(request.request_id, ok, latents.tolist()) for request, ok, latents in taken] == [
            (
                request.request_id,
                request.request_id != "second 1",
                model.latents(request).flatten().tolist(),
            )
            for batch in batches
            for request in batch
        ]
        assert all(latents.dtype == torch.float32 for _, _, latents in taken)
    dist.barrier()


def test_results_come_in_order_from_the_counterpart_on_the_last_stage() -> None:
    address = f"tcp://127.0.0.1:{port_for_a_server()}"
    run_ranks(rank_of_a_column, (address,), 5)
