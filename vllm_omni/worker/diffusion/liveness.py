# SPDX-License-Identifier: Apache-2.0
"""Which ranks are alive: those of one engine end together, when one is gone, stands still, or has failed.

A rank that waits in a collective for a dead one waits for minutes, and so does everybody who waits for a result; vLLM
notices a worker's end, but gives the others 9 s to answer, and a stopped worker not at all. Here a thread of each rank
(`Watchdog`) sends a datagram to every other twice a second. When one has ended, or has been silent for `timeout_s`, the
rank logs why, kills the silent one if it is on this machine, and ends itself at once: vLLM's executor then reports a
dead engine.

The thread proves that its process runs, not that the main thread makes progress: a step that hangs in the device is
left to vLLM (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`). A process that was itself stopped (a debugger, Ctrl-Z, a paused
machine) starts counting afresh. `end_rank` is the one way in which a rank ends itself, also when its own work has
failed (`failing_together`). Knows no model and no scheduler; torch and vLLM, whose process groups say which ranks there
are, are imported only where they are asked. Held by tests/worker/test_watchdog.py, test_watchdog_thread.py and
test_rank_watch.py there, and tests/engine/test_dead_stage.py.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_omni.exit_codes import ENGINE_DIED
from vllm_omni.processes import machine_id

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

logger = logging.getLogger("vllm." + __name__)

_OWN_GAP_BEATS = 4
"""A thread that was held up for so long cannot tell whether the others were."""
_GRACE_BEATS = 4
"""How long a rank may outlive another: on an orderly shutdown all end, one after the other."""


@dataclass(frozen=True)
class Peer:
    """Another rank. machine: equal exactly for ranks on one machine. address: where its socket listens."""

    rank: int
    pid: int
    machine: str
    address: tuple[str, int]


@dataclass
class Watchdog:
    """This rank's end. listen: a bound UDP socket, which it takes over. token: the same for all ranks, sent along.

    beat_s: time from one datagram to the next.
    """

    rank: int
    listen: socket.socket
    peers: Sequence[Peer]
    machine: str
    token: bytes
    timeout_s: float
    beat_s: float = 0.5
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="RankWatchdog").start()

    def stop(self) -> None:
        """An orderly shutdown has begun: from now on others may end. Idempotent."""
        self._stop.set()

    def _run(self) -> None:
        self.listen.setblocking(False)
        ends: dict[int, Peer] = {}
        for peer in self.peers:
            if peer.machine == self.machine:
                with contextlib.suppress(OSError):  # gone already: its silence will tell
                    ends[os.pidfd_open(peer.pid)] = peer
        try:
            self._watch(ends)
        finally:
            self.listen.close()
            for descriptor in ends:
                os.close(descriptor)

    def _watch(self, ends: dict[int, Peer]) -> None:
        poll = select.poll()
        for descriptor in (self.listen.fileno(), *ends):
            poll.register(descriptor, select.POLLIN)
        beat = self.token + self.rank.to_bytes(4, "little")
        looked = time.monotonic()
        heard = {peer.rank: looked for peer in self.peers}
        ended: tuple[float, Peer] | None = None
        while not self._stop.is_set():
            for peer in self.peers:
                with contextlib.suppress(OSError):  # a full buffer or a dead address: the next beat, or its silence
                    self.listen.sendto(beat, peer.address)
            ready = {descriptor for descriptor, _ in poll.poll(self.beat_s * 1e3)}
            now = time.monotonic()
            if now - looked > _OWN_GAP_BEATS * self.beat_s:
                heard = dict.fromkeys(heard, now)
            looked = now
            for descriptor in ready & ends.keys():
                poll.unregister(descriptor)
                ended = ended or (now, ends[descriptor])
            for rank in self._take_in():
                heard[rank] = now
            if ended is not None and now - ended[0] > _GRACE_BEATS * self.beat_s:
                self._give_up(f"rank {ended[1].rank} (process {ended[1].pid}) has ended", ())
            silent = [peer for peer in self.peers if now - heard[peer.rank] > self.timeout_s]
            if silent:
                ranks = ", ".join(f"{peer.rank} (process {peer.pid})" for peer in silent)
                self._give_up(f"nothing was heard of rank {ranks} for {self.timeout_s:g} s", silent)
            time.sleep(max(0.0, looked + self.beat_s - time.monotonic()))

    def _take_in(self) -> list[int]:
        ranks: list[int] = []
        while True:
            try:
                data = self.listen.recv(64)
            except OSError:
                return ranks
            rank = int.from_bytes(data[len(self.token) :], "little")
            if data.startswith(self.token) and any(peer.rank == rank for peer in self.peers):
                ranks.append(rank)

    def _give_up(self, reason: str, silent: Sequence[Peer]) -> None:
        if self._stop.is_set():
            return
        for peer in silent:
            if peer.machine == self.machine:
                with contextlib.suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)
        end_rank(self.rank, reason)


def end_rank(rank: int, reason: str, error: BaseException | None = None) -> NoReturn:
    """Log why, with the traceback of `error`, and end this process at once: nothing is cleaned up or waited for."""
    logger.critical("rank %d ends itself, so that the engine is reported dead: %s", rank, reason, exc_info=error)
    os._exit(ENGINE_DIED)


@contextlib.contextmanager
def failing_together(*, heard: bool) -> Iterator[None]:
    """Around work that other ranks take part in: an exception ends this process, so that nobody waits for it.

    vLLM's workers log an exception and wait for the next call. One rank's is the engine's answer; of another's the
    engine never learns, and the others wait in their collectives. heard: this is the rank whose exception is the
    answer: it is raised as usual, and so it is on an engine's only rank.
    """
    from vllm.distributed.parallel_state import get_world_group

    try:
        yield
    except Exception as error:
        world = get_world_group()
        if world.world_size > 1 and not heard:
            end_rank(world.rank, f"{type(error).__name__} in work that other ranks wait for", error)
        raise


def answers_steps() -> bool:
    """Whether vLLM's executors take a step's result, or its exception, from this rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().is_last_rank and get_tp_group().is_first_rank


def watch_other_ranks(timeout_s: float) -> Watchdog:
    """Collective over tensor- and pipeline-parallel ranks; returns this rank's end, started."""
    from vllm.distributed.parallel_state import get_world_group
    from vllm.utils.network_utils import get_ip

    rank, machine = get_world_group().rank, machine_id()
    one_machine = len({place for places in _gathered(machine) for place in places}) == 1
    host = "127.0.0.1" if one_machine else get_ip()
    listen = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    listen.bind((host, 0))
    mine = (rank, os.getpid(), machine, host, listen.getsockname()[1], os.urandom(16))
    everybody = sorted(entry for column in _gathered(mine) for entry in column)
    peers = [Peer(each, pid, place, (ip, port)) for each, pid, place, ip, port, _ in everybody if each != rank]
    watchdog = Watchdog(rank, listen, peers, machine, everybody[0][-1], timeout_s)
    watchdog.start()
    return watchdog


def _gathered(mine: Any) -> list[list[Any]]:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return _from_all(get_pp_group(), _from_all(get_tp_group(), mine))


def _from_all(group: "GroupCoordinator", mine: Any) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [mine] * group.world_size
    if group.world_size > 1:
        dist.all_gather_object(found, mine, group=group.cpu_group)
    return found
