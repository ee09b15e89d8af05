# SPDX-License-Identifier: Apache-2.0
"""Starts the watchdog between the ranks of one engine: who they are comes from vLLM's process groups.

Held by tests/engine/test_dead_stage.py.
"""

import os
import socket
from typing import Any

import torch.distributed as dist
from vllm.distributed.parallel_state import GroupCoordinator, get_pp_group, get_tp_group, get_world_group
from vllm.utils.network_utils import get_ip

from vllm_omni.worker.watchdog import Peer, Watchdog, machine_id


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
