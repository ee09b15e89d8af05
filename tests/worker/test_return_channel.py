# SPDX-License-Identifier: Apache-2.0
"""`ReturnChannel` with a process group in this process: who talks to whom, and how long a message
lives.

tests/worker/test_pipeline_parallel.py has real ranks.
"""

import weakref
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.worker.diffusion import link
from vllm_omni.worker.diffusion.link import ReturnChannel, connect_forward

FIRST, SECOND, VAE = (0, 2, 4), (1, 3, 5), 6
COLUMNS = [FIRST, SECOND, FIRST, SECOND, FIRST, SECOND, FIRST]
"""Three stages of two ranks, and a rank that only decodes: each one's column of ranks with
layers.
"""
META = torch.device("meta")
CPU = torch.device("cpu")


class Work:
    """A transfer: `arrive` fills a receive's buffer when somebody waits for it."""

    def __init__(self, arrive: Any = lambda: None) -> None:
        self.completed, self.wait = False, arrive

    def is_completed(self) -> bool:
        return self.completed


class Group:
    """torch.distributed of seven ranks, of which `rank` is the one that acts."""

    def __init__(self) -> None:
        self.rank = 0
        self.calls: list[Any] = []
        self.works: list[Work] = []
        self.messages: defaultdict[Any, deque[torch.Tensor]] = defaultdict(deque)

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
        self.messages[self.rank, dst, group].append(message.clone())
        self.calls.append(weakref.ref(message))
        self.works.append(Work())
        return self.works[-1]

    def irecv(self, buffer: torch.Tensor, *, src: int, group: Any) -> Work:
        arriving = self.messages[src, self.rank, group]
        return Work(lambda: buffer.copy_(arriving.popleft()))


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
def test_every_rank_makes_all_groups_and_connects_its_own(
    group: Group, rank: int, connected: list[Any]
) -> None:
    """In one order, as `new_group` asks for; one element goes to each earlier stage."""
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
    """Along vLLM's own way: a rank that waits for the one before it is not waited for by it."""
    pp: Any = SimpleNamespace(
        is_first_rank=first, is_last_rank=last, prev_rank=7, next_rank=9, device_group="stages"
    )
    connect_forward(pp, META)
    peers = {"recv": 7, "send": 9}
    assert group.calls == [(call, peers[call], "stages", 1, "meta") for call in calls]


class Model:
    def latents(self, request: Any) -> torch.Tensor:
        return torch.full(request.shape, request.value, dtype=torch.bfloat16)


def batch(number: int, *, steps_left: int = 0) -> list[Any]:
    """Two requests of different sizes."""
    names = {f"a{number}": (number + 1, 2), f"b{number}": (3,)}
    return [
        SimpleNamespace(
            request_id=name,
            shape=shape,
            value=10.0 * number + position,
            step=4 - steps_left,
            num_steps=4,
        )
        for position, (name, shape) in enumerate(names.items())
    ]


def test_responses_are_applied_up_to_the_newest_that_was_requested_for(group: Group) -> None:
    """A status counts where a chunk may be committed; before that nobody waits for the device to
    read it.
    """
    model: Any = Model()
    last, middle = channel(group, 4), channel(group, 2)
    batches = [batch(0, steps_left=1), batch(1), batch(2)]
    for requests in batches:
        group.rank = 4
        last.send(requests, [True, False], [model.latents(request) for request in requests])
        group.rank = 2
        middle.expect(requests)
        middle.listen(model)
    taken: list[Any] = []
    for requested, number in (
        ([], 0),
        (["nobody"], 0),
        (["a0", "b1"], 4),
        (["a0"], 4),
        (["b2"], 6),
        (["b2"], 6),
    ):
        middle.drain(
            requested, lambda request, ok, latents: taken.append((request.request_id, ok, latents))
        )
        assert len(taken) == number
    assert [(name, ok, latents.tolist()) for name, ok, latents in taken] == [
        ("a0", True, [0.0] * 2),
        ("b0", True, [1.0] * 3),
        ("a1", True, [10.0] * 4),
        ("b1", False, [11.0] * 3),
        ("a2", True, [20.0] * 6),
        ("b2", False, [21.0] * 3),
    ]
    assert {latents.dtype for *_, latents in taken} == {torch.float32}


def test_a_message_lives_until_every_stage_has_it(group: Group) -> None:
    last = channel(group, 4)
    group.calls.clear()
    for _ in range(2):
        last.send(batch(0), [True, True], [torch.zeros(2), torch.zeros(3)])
    first, second = group.calls[0], group.calls[2]
    assert [message.shape for message in (first(), second())] == [(7,)] * 2
    group.works[0].completed = group.works[3].completed = True
    last.send(batch(0), [True, True], [torch.zeros(2), torch.zeros(3)])
    assert first() is not None, "one of two stages still receives it"
    for work in group.works[:4]:
        work.completed = True
    last.send(batch(0), [True, True], [torch.zeros(2), torch.zeros(3)])
    assert first() is None
    assert second() is None
    assert group.calls[-1]() is not None
