# SPDX-License-Identifier: Apache-2.0
"""The ranks of one engine end together: the watchdog between them, and what a failure of one rank's work does.

Who they are comes from vLLM's process groups. Knows no model. Held by tests/worker/test_rank_watch.py and
tests/engine/test_dead_stage.py.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from vllm.distributed.parallel_state import GroupCoordinator, get_pp_group, get_tp_group, get_world_group
from vllm.utils.network_utils import get_ip

from vllm_omni.processes import machine_id
from vllm_omni.worker.diffusion.watchdog import Peer, Watchdog, end_rank


@contextlib.contextmanager
def failing_together(*, heard: bool) -> Iterator[None]:
    """Around work that other ranks take part in: an exception ends this process, so that nobody waits for it.

    vLLM's workers log an exception and wait for the next call. One rank's is the engine's answer; of another's the
    engine never learns, and the others wait in their collectives. heard: this is the rank whose exception is the
    answer: it is raised as usual, and so it is on an engine's only rank.
    """
    try:
        yield
    except Exception as error:
        world = get_world_group()
        if world.world_size > 1 and not heard:
            end_rank(world.rank, f"{type(error).__name__} in work that other ranks wait for", error)
        raise


def answers_steps() -> bool:
    """Whether vLLM's executors take a step's result, or its exception, from this rank."""
    return get_pp_group().is_last_rank and get_tp_group().is_first_rank


def watch_other_ranks(timeout_s: float) -> Watchdog:
    """Collective over tensor- and pipeline-parallel ranks; returns this rank's end, started."""
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
    return _from_all(get_pp_group(), _from_all(get_tp_group(), mine))


def _from_all(group: GroupCoordinator, mine: Any) -> list[Any]:
    found: list[Any] = [mine] * group.world_size
    if group.world_size > 1:
        dist.all_gather_object(found, mine, group=group.cpu_group)
    return found
