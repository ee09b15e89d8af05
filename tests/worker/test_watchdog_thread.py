# SPDX-License-Identifier: Apache-2.0
"""One rank's watchdog: its datagrams and timeouts, and how it ends the process.

The tests only record the exit code that the process would have returned.
"""

import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from helpers.waits import exactly
from vllm.distributed import parallel_state
from vllm.utils import network_utils

from vllm_omni.runtime.exit_codes import ENGINE_DIED
from vllm_omni.runtime.processes import machine_id
from vllm_omni.worker.diffusion.liveness import (
    PeerRank,
    Watchdog,
    runs_steps,
    watch_other_ranks,
)

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    # raised by `exits`
    pytest.mark.filterwarnings("ignore:(?s)Exception in thread RankWatchdog.*SystemExit"),
]
TOKEN, RANK, BEAT_S = b"token of sixteen", 258, 0.1
HERE, ELSEWHERE = "this machine", "another machine"
NO_PROCESS = 2**30
"""A process id larger than any real process id."""
SOON_S = 20.0
"""A timeout in seconds that suffices even on a busy machine."""


def bound() -> socket.socket:
    listen = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listen.bind(("127.0.0.1", 0))
    listen.settimeout(SOON_S)
    return listen


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[int]":
    """A queue of the exit codes that this process would return. In the tests, only the calling
    thread ends.
    """
    codes: queue.Queue[int] = queue.Queue()

    def leave(code: int) -> None:
        codes.put(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    return codes


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A real process that stands in for another rank."""
    sleeping = subprocess.Popen(["sleep", "600"])
    yield sleeping
    sleeping.kill()
    sleeping.wait()


@pytest.fixture
def watch() -> Iterator[Callable[..., Watchdog]]:
    """Return a function that starts watchdogs: `watch(*peers, timeout_s=..., listen=...)`. The
    fixture stops them afterwards.
    """
    dogs: list[Watchdog] = []

    def start(
        *peers: PeerRank, timeout_s: float = 60.0, listen: socket.socket | None = None
    ) -> Watchdog:
        dog = Watchdog(RANK, listen or bound(), peers, HERE, TOKEN, timeout_s, beat_s=BEAT_S)
        dog.start_watching()
        dogs.append(dog)
        return dog

    yield start
    for dog in dogs:
        dog.stop()
    for thread in threads():
        thread.join(SOON_S)
        assert not thread.is_alive()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "RankWatchdog"]


def beat(rank: int, token: bytes = TOKEN) -> bytes:
    return token + rank.to_bytes(4, "little")


def test_every_other_rank_receives_a_datagram_per_beat(watch: Callable[..., Watchdog]) -> None:
    """The watchdog sends one datagram per beat to every other rank.

    Neither an invalid rank address nor received datagrams change this interval.
    """
    first, second = bound(), bound()
    unreachable = PeerRank(1, NO_PROCESS, ELSEWHERE, ("127.0.0.1", 0))
    peers = [
        PeerRank(rank, NO_PROCESS, ELSEWHERE, end.getsockname())
        for rank, end in ((2, first), (3, second))
    ]
    dog = watch(unreachable, *peers)
    address = dog.listen.getsockname()
    started_s = time.monotonic()
    for _ in range(6):
        for listen in (first, second):
            assert listen.recv(64) == TOKEN + b"\2\1\0\0"
            listen.sendto(beat(2), address)
    assert 4.5 * BEAT_S < time.monotonic() - started_s < 5 * 1.0


def test_silent_ranks_of_other_machines_are_named_and_not_killed(
    watch: Callable[..., Watchdog],
    exits: "queue.Queue[int]",
    process: "subprocess.Popen[bytes]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    end = bound()
    others = [PeerRank(rank, process.pid, ELSEWHERE, end.getsockname()) for rank in (1, 2)]
    started_s = time.monotonic()
    watch(*others, timeout_s=0.5)
    assert exits.get(timeout=SOON_S) == ENGINE_DIED
    assert time.monotonic() - started_s > 0.5
    pid = process.pid
    assert caplog.messages == [
        f"rank {RANK} exits, so that the engine is reported dead: no datagram arrived from rank 1 "
        f"(process {pid}), "
        f"2 (process {pid}) for 0.5 s"
    ]
    assert process.poll() is None


def test_a_silent_rank_of_this_machine_is_killed(
    watch: Callable[..., Watchdog], exits: "queue.Queue[int]", process: "subprocess.Popen[bytes]"
) -> None:
    """A silent rank on this machine is killed, because a stopped process would otherwise keep its
    GPU memory.
    """
    watch(PeerRank(1, process.pid, HERE, bound().getsockname()), timeout_s=0.5)
    assert exits.get(timeout=SOON_S) == ENGINE_DIED
    assert process.wait(SOON_S) == -signal.SIGKILL


def test_a_rank_that_ended_before_the_first_beat_is_silent(
    watch: Callable[..., Watchdog], exits: "queue.Queue[int]", caplog: pytest.LogCaptureFixture
) -> None:
    watch(PeerRank(1, NO_PROCESS, HERE, bound().getsockname()), timeout_s=0.5)
    assert exits.get(timeout=SOON_S) == ENGINE_DIED
    assert f"no datagram arrived from rank 1 (process {NO_PROCESS}) for 0.5 s" in caplog.text


def test_an_ended_process_is_detected_within_a_few_beats(
    watch: Callable[..., Watchdog],
    exits: "queue.Queue[int]",
    process: "subprocess.Popen[bytes]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If a rank's process on this machine has ended, the watchdog detects this within a few beats,
    without waiting for the timeout.

    Live ranks and remote ranks are unaffected.
    """
    address = bound().getsockname()
    living = PeerRank(1, os.getpid(), HERE, address)
    ending = PeerRank(2, process.pid, HERE, address)
    watch(living, ending, PeerRank(3, NO_PROCESS, ELSEWHERE, address))
    exactly(6 * BEAT_S)
    assert exits.empty()
    process.kill()
    started_s = time.monotonic()
    assert exits.get(timeout=SOON_S) == ENGINE_DIED
    assert time.monotonic() - started_s > 3.5 * BEAT_S
    assert caplog.text.rstrip().endswith(f"rank 2 (process {process.pid}) has ended")


def test_an_orderly_shutdown_ends_no_process(
    watch: Callable[..., Watchdog], exits: "queue.Queue[int]", process: "subprocess.Popen[bytes]"
) -> None:
    """If the watchdog is stopped soon after another rank has ended, as in an orderly shutdown, this
    process does not exit. The watchdog thread ends and closes its file descriptors.
    """
    address = bound().getsockname()
    before = set(os.listdir("/proc/self/fd"))
    dog = watch(PeerRank(1, process.pid, HERE, address), timeout_s=0.5)
    (thread,) = threads()
    assert thread.daemon, "a daemon thread does not keep the process alive"
    process.kill()
    exactly(2 * BEAT_S)
    dog.stop()
    dog.stop()
    thread.join(SOON_S)
    assert exits.empty()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_only_datagrams_with_the_token_count(
    watch: Callable[..., Watchdog], exits: "queue.Queue[int]", caplog: pytest.LogCaptureFixture
) -> None:
    """Only datagrams that contain the engine's token count as signs of life.

    In this test, one rank sends the engine's token and counts as alive. Another rank sends a
    different token.
    """
    address = bound().getsockname()
    others = [PeerRank(rank, NO_PROCESS, ELSEWHERE, address) for rank in (1, 2)]
    dog, sender = watch(*others, timeout_s=1.0), bound()
    deadline_s = time.monotonic() + SOON_S
    while exits.empty() and time.monotonic() < deadline_s:
        for datagram in (beat(1), beat(2, b"token of another"), beat(3), b"", b"\xff" * 64):
            sender.sendto(
                datagram, dog.listen.getsockname() if dog.listen.fileno() >= 0 else address
            )
        time.sleep(BEAT_S)
    assert exits.get(timeout=SOON_S) == ENGINE_DIED
    assert f"no datagram arrived from rank 2 (process {NO_PROCESS}) for 1 s" in caplog.text


class DelayedSocket(socket.socket):
    """A socket that delays its first send by more than four beats, as if the machine had been
    paused.
    """

    delay_s = 0.0

    def sendto(self, *args: Any) -> int:
        if not self.delay_s:
            self.delay_s = 8 * BEAT_S
            time.sleep(self.delay_s)
        return super().sendto(*args)


def test_a_rank_that_was_paused_restarts_its_timeouts(
    watch: Callable[..., Watchdog], exits: "queue.Queue[int]"
) -> None:
    listen = DelayedSocket(socket.AF_INET, socket.SOCK_DGRAM)
    listen.bind(("127.0.0.1", 0))
    started_s = time.monotonic()
    watch(PeerRank(1, NO_PROCESS, ELSEWHERE, bound().getsockname()), timeout_s=0.5, listen=listen)
    assert exits.get(timeout=SOON_S) == ENGINE_DIED
    assert time.monotonic() - started_s > 8 * BEAT_S + 0.5


@pytest.mark.parametrize("last_stage", [False, True])
@pytest.mark.parametrize("first_of_its_stage", [False, True])
def test_steps_are_served_by_the_first_rank_of_the_last_stage(
    monkeypatch: pytest.MonkeyPatch, last_stage: bool, first_of_its_stage: bool
) -> None:
    monkeypatch.setattr(parallel_state, "_PP", SimpleNamespace(is_last_rank=last_stage))
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(is_first_rank=first_of_its_stage))
    assert runs_steps() == (last_stage and first_of_its_stage)


class Groups:
    """A mock of vLLM's process groups as seen by the second of four ranks, with two pipeline stages
    on `machines`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *machines: str) -> None:
        self.machines = machines
        self.entries: list[tuple[Any, ...]] = []
        monkeypatch.setattr(parallel_state, "_WORLD", SimpleNamespace(rank=1, world_size=4))
        monkeypatch.setattr(
            parallel_state, "_TP", SimpleNamespace(world_size=2, cpu_group="ranks of a stage")
        )
        monkeypatch.setattr(
            parallel_state, "_PP", SimpleNamespace(world_size=2, cpu_group="stages")
        )
        monkeypatch.setattr(dist, "all_gather_object", self.gather)

    def gather(self, found: list[Any], mine: Any, group: str) -> None:
        if group == "stages":
            found[:] = [mine, [self.of(2 + position, each) for position, each in enumerate(mine)]]
        else:
            found[:] = [self.of(0, mine), mine]

    def of(self, rank: int, mine: Any) -> Any:
        """Return the object that `rank` contributes to a collective."""
        machine = self.machines[rank // 2]
        if isinstance(mine, str):
            return machine
        _, _, _, host, _, token = mine
        self.entries.append(
            (rank, 1000 + rank, machine, host, 5000 + rank, b"token of rank %02d" % rank)
        )
        assert len(token) == 16
        return self.entries[-1]


IPV6 = (
    "lo" in Path("/proc/net/if_inet6").read_text().split()
    if Path("/proc/net/if_inet6").exists()
    else False
)


@pytest.mark.parametrize(
    ("other_machine", "address", "family", "used"),
    [
        (False, "127.0.0.2", socket.AF_INET, "127.0.0.1"),
        (True, "127.0.0.2", socket.AF_INET, "127.0.0.2"),
        pytest.param(
            True,
            "::1",
            socket.AF_INET6,
            "::1",
            marks=pytest.mark.skipif(not IPV6, reason="no IPv6 here"),
        ),
    ],
)
def test_ranks_exchange_addresses_and_a_token(
    monkeypatch: pytest.MonkeyPatch, other_machine: bool, address: str, family: int, used: str
) -> None:
    """Ranks exchange their addresses, and all use the token of rank 0.

    If all ranks are on one machine, they listen on the loopback interface. Otherwise each rank
    listens on its host's address.
    """
    here = machine_id()
    groups = Groups(monkeypatch, here, "another machine" if other_machine else here)
    monkeypatch.setattr(network_utils, "get_ip", lambda: address)
    started: list[Watchdog] = []
    monkeypatch.setattr(Watchdog, "start_watching", lambda dog: started.append(dog))
    dog = watch_other_ranks(7.5)
    with dog.listen as listen:
        assert (listen.family, listen.type) == (family, socket.SOCK_DGRAM)
        assert listen.getsockname()[0] == used
        assert listen.getsockname()[1] >= 1024
    assert started == [dog]
    assert (dog.rank, dog.machine, dog.timeout_s, dog.token) == (1, here, 7.5, b"token of rank 00")
    assert [peer.rank for peer in dog.peers] == [0, 2, 3]
    entries = {entry[0]: entry for entry in groups.entries}
    for peer in dog.peers:
        rank, pid, machine, host, port, _ = entries[peer.rank]
        assert peer == PeerRank(rank, pid, machine, (host, port))
        assert host == used
