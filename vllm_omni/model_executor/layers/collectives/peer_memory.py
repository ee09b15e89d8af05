# SPDX-License-Identifier: Apache-2.0
"""`PeerMemory`: buffers through which one machine's GPUs write directly into each other's memory
instead of calling a collective.

`PeerMemory` uses torch's symmetric memory: each rank of a group has a buffer of the same size,
mapped into all ranks, and barriers run on the device. A rank writes data directly to the location
from which another rank reads it. No data is packed, staged or unpacked, and the whole exchange can
be part of a CUDA graph. Peer memory is faster than NCCL's all-to-all, even without counting the
time for packing (docs/architecture/speed_log.md).

The protocol is: write, call `barrier`, read. A second `barrier` ensures that all ranks have read a
buffer before a rank writes to it again.
"""

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from vllm_omni.model_executor.layers.fast_path import FastPath, Lack

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


def _path(lack: Lack) -> FastPath:
    return lack.of("peer_memory", "collectives")


NOT_SHARDED: Final = _path(Lack("no ranks shard tokens (omni.model.sequence_parallel)"))
"""The fast path that ranks report if they do not use sequence parallelism."""


class PeerMemory:
    """Named buffers for a group's ranks, for use on one CUDA stream. All methods are collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._handles: dict[str, Any] = {}
        # Buffers that were replaced by larger ones. They are retained because CUDA graphs may still
        # write to them.
        self._replaced: list[Any] = []

    @classmethod
    def of_group(cls, group: "GroupCoordinator") -> "tuple[PeerMemory | None, FastPath]":
        """Return the peer memory for one of vLLM's groups, or None if its ranks cannot write into
        each other's memory. The `FastPath` contains the reason.
        """
        from vllm.distributed.parallel_state import in_the_same_node_as

        here = (
            torch.cuda.current_device()
            if torch.cuda.is_available() and torch.version.cuda is not None
            else None
        )
        devices: list[int | None] = [None] * group.world_size
        dist.all_gather_object(devices, here, group=group.cpu_group)
        same_machine = all(in_the_same_node_as(group.cpu_group))
        others = [device for device in devices if device is not None and device != here]
        # If each rank sees only its own GPU, every rank numbers its GPU 0, so torch cannot detect
        # peer access between the GPUs.
        named_apart = here is not None and len(others) == group.world_size - 1
        reaches = named_apart and all(
            torch.cuda.can_device_access_peer(here, device) for device in others
        )
        lack = Lack()
        if not same_machine:
            lack = Lack("the ranks are on several machines")
        elif not named_apart:
            lack = Lack("the ranks have no CUDA device each, or each rank sees only its own")
        elif not reaches:
            lack = Lack(f"GPU {here} has no peer access to another rank's GPU")
        lacks = [lack] * group.world_size
        dist.all_gather_object(lacks, lack, group=group.cpu_group)
        lack = next(filter(None, lacks), lack)
        return None if lack else cls(group.device_group), _path(lack)

    def buffers(self, name: str, nbytes: int) -> list[torch.Tensor]:
        """Return each rank's buffer with this name, uint8 [nbytes]. The buffer of an earlier call
        with this name is reused if it is large enough.
        """
        handle = self._handles.get(name)
        if handle is None or handle.buffer_size < nbytes:
            assert not torch.cuda.is_current_stream_capturing(), (
                "a graph is of a forward that has run before"
            )
            if handle is not None:
                self._replaced.append(handle)
            handle = self._handles[name] = self._allocate(nbytes)
        return [
            handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(handle.world_size)
        ]

    def _allocate(self, nbytes: int) -> Any:
        import torch.distributed._symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda"))
        return symmetric_memory.rendezvous(buffer, self._group.group_name)

    def barrier(self) -> None:
        """Make later kernels on this CUDA stream wait for earlier kernels on the CUDA streams of
        the other ranks.
        """
        handle = next(iter(self._handles.values()))
        handle.barrier(channel=0)
