# SPDX-License-Identifier: Apache-2.0
"""A process group for tests that run one process per rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def process_group(
    rank: int, size: int, rendezvous: str, backend: str = "gloo"
) -> Iterator[dist.ProcessGroup]:
    """Join the default process group, use one compute thread in this process, and leave the group
    at the end.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        rendezvous: Path of a file that does not exist yet. All ranks use the same path.
        backend: Backend for collectives.

    Yields:
        The default process group.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
