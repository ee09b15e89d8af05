# SPDX-License-Identifier: Apache-2.0
"""Rank liveness: all ranks of an engine exit together when one of them has exited, been stopped or
failed.

If a rank dies, the other ranks wait for it in a collective for minutes, and all clients wait for
their results. vLLM detects that a worker has exited, but gives the other workers 9 s to exit, and
it does not detect a stopped worker. Therefore, a thread on each rank (`Watchdog`) sends a datagram
to every other rank twice a second. When a rank has exited, or has been silent for `timeout_s`, the
thread logs the reason, kills the silent process if it is on this machine, and ends its own process
immediately. vLLM's executor then reports a dead engine. On the API server's machine, `EngineWatch`
usually kills the ranks earlier; docs/how_to/operations.md ("Who watches whom") compares the checks.

A heartbeat only proves that a process is running, not that its main thread is making progress. vLLM
handles a step that hangs on the device (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`). A process that was
itself stopped (by a debugger, Ctrl-Z or a suspended machine) restarts its timers. If one of several
ranks has to exit, it exits through `end_rank`, even if the cause is a failure in its own work
(`failing_together`). This module does not depend on a model or on the scheduler. torch and vLLM,
whose process groups define the ranks, are imported only where they are used.
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

from vllm_omni.runtime.exit_codes import ENGINE_DIED
from vllm_omni.runtime.processes import machine_id

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

logger = logging.getLogger("vllm." + __name__)

_OWN_GAP_BEATS = 4
"""Maximum delay of the watchdog's own thread, in heartbeats. After a longer delay, the watchdog
cannot judge whether other ranks were silent.
"""
_GRACE_BEATS = 4
"""Number of heartbeats that a rank waits, after another rank has exited, before it also exits. In
an orderly shutdown, ranks exit one at a time, so this rank's watchdog is stopped within this time.
"""


@dataclass(frozen=True)
class PeerRank:
    """Another rank of the same engine."""

    rank: int
    """Global rank of the process."""
    pid: int
    """Process id of the rank."""
    machine: str
    """Identifier of the rank's machine (`machine_id`)."""
    address: tuple[str, int]
    """Host and port of the rank's socket."""


@dataclass
class Watchdog:
    """Sends this rank's heartbeats, and monitors all other ranks of the engine."""

    rank: int
    """Global rank of this process."""
    listen: socket.socket
    """Bound UDP socket that the watchdog owns."""
    peers: Sequence[PeerRank]
    """All other ranks of the engine."""
    machine: str
    """Identifier of this process's machine; see `PeerRank.machine`."""
    token: bytes
    """Prefix of all datagrams. It is the same on all ranks of the engine."""
    timeout_s: float
    """Time in seconds without a heartbeat after which a rank counts as dead."""
    beat_s: float = 0.5
    """Seconds between two datagrams."""
    _stop: threading.Event = field(default_factory=threading.Event)
    """Set when an orderly shutdown has started."""

    def start_watching(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="RankWatchdog").start()

    def stop(self) -> None:
        """Stop the watchdog for an orderly shutdown, when other ranks may exit. Idempotent."""
        self._stop.set()

    def _run(self) -> None:
        self.listen.setblocking(False)
        ends: dict[int, PeerRank] = {}
        for peer in self.peers:
            if peer.machine == self.machine:
                with contextlib.suppress(OSError):  # an exited rank is detected by its silence
                    ends[os.pidfd_open(peer.pid)] = peer
        try:
            self._watch(ends)
        finally:
            self.listen.close()
            for descriptor in ends:
                os.close(descriptor)

    def _watch(self, ends: dict[int, PeerRank]) -> None:
        poll = select.poll()
        for descriptor in (self.listen.fileno(), *ends):
            poll.register(descriptor, select.POLLIN)
        beat = self.token + self.rank.to_bytes(4, "little")
        looked = time.monotonic()
        heard = {peer.rank: looked for peer in self.peers}
        ended: tuple[float, PeerRank] | None = None
        while not self._stop.is_set():
            for peer in self.peers:
                # If the buffer is full, only this heartbeat is lost. If the address is dead, the
                # rank is detected by its silence.
                with contextlib.suppress(OSError):
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
                self._give_up(
                    f"no datagram arrived from rank {ranks} for {self.timeout_s:g} s", silent
                )
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

    def _give_up(self, reason: str, silent: Sequence[PeerRank]) -> None:
        if self._stop.is_set():
            return
        for peer in silent:
            if peer.machine == self.machine:
                with contextlib.suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)
        end_rank(self.rank, reason)


def end_rank(rank: int, reason: str, error: BaseException | None = None) -> NoReturn:
    """Log the reason and exit immediately, without cleanup.

    Args:
        rank: Rank of this process.
        reason: Reason to log.
        error: Exception whose traceback is logged, or None if there is no exception.
    """
    logger.critical(
        "rank %d exits, so that the engine is reported dead: %s", rank, reason, exc_info=error
    )
    os._exit(ENGINE_DIED)


@contextlib.contextmanager
def failing_together(*, heard: bool) -> Iterator[None]:
    """Context manager for work that involves other ranks. An exception ends the process.

    vLLM's workers log an exception and wait for the next call, and the engine reads the exception
    of only one rank. If another rank fails, its exception never reaches the engine, and all ranks
    would wait in their collectives.

    Args:
        heard: Whether the engine reads the exception of this rank. If so, the exception is raised
            as usual. An exception on the engine's only rank is also raised as usual.
    """
    from vllm.distributed.parallel_state import get_world_group

    try:
        yield
    except Exception as error:
        world = get_world_group()
        if world.world_size > 1 and not heard:
            end_rank(
                world.rank, f"{type(error).__name__} in work that other ranks take part in", error
            )
        raise


def runs_steps() -> bool:
    """Return whether vLLM's executors read the result or exception of a step from this rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().is_last_rank and get_tp_group().is_first_rank


def watch_other_ranks(timeout_s: float) -> Watchdog:
    """Start this rank's watchdog (collective over tensor- and pipeline-parallel ranks).

    Args:
        timeout_s: Time in seconds without a heartbeat after which a rank counts as dead.
    """
    from vllm.distributed.parallel_state import get_world_group
    from vllm.utils.network_utils import get_ip

    rank, machine = get_world_group().rank, machine_id()
    one_machine = len({position for positions in _gathered(machine) for position in positions}) == 1
    host = "127.0.0.1" if one_machine else get_ip()
    listen = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    listen.bind((host, 0))
    mine = (rank, os.getpid(), machine, host, listen.getsockname()[1], os.urandom(16))
    everybody = sorted(entry for column in _gathered(mine) for entry in column)
    peers = [
        PeerRank(each, pid, position, (ip, port))
        for each, pid, position, ip, port, _ in everybody
        if each != rank
    ]
    watchdog = Watchdog(rank, listen, peers, machine, everybody[0][-1], timeout_s)
    watchdog.start_watching()
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
