# SPDX-License-Identifier: Apache-2.0
"""`PeerMemory`: GPUs of one machine write into each other's memory, instead of sending through a collective.

torch's symmetric memory: every rank of a group has a buffer of the same size, mapped into all of them, and kernels meet
on the device. Whoever has numbers for another rank writes them where that rank reads them, so nothing is packed, staged
and unpacked, and all of it may lie in one CUDA graph. On two H200s an exchange of 10.8 MB takes 50 us, copies included,
where NCCL's all-to-all alone takes 61 (docs/architecture/speed_log.md).

Writes, then `meet`, then reads; and before anybody writes there again all must have read, which a `meet` between says.
Held by tests/model_executor/layers/test_head_exchange.py.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class PeerMemory:
    """Named buffers of a group's ranks. Used on one stream; all methods are collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._handles: dict[str, Any] = {}
        self._replaced: list[Any] = []  # by larger ones: CUDA graphs may write there still

    @classmethod
    def of_group(cls, group: "GroupCoordinator") -> "PeerMemory | None":
        """For one of vLLM's groups; None where its ranks can not write into each other's memory."""
        from vllm.distributed.parallel_state import in_the_same_node_as

        here = torch.cuda.current_device() if torch.cuda.is_available() and torch.version.cuda is not None else None
        devices: list[int | None] = [None] * group.world_size
        dist.all_gather_object(devices, here, group=group.cpu_group)
        same_machine = all(in_the_same_node_as(group.cpu_group))
        others = [device for device in devices if device is not None and device != here]
        # Ranks that see one device each call them all 0, and torch then finds no way from one to another.
        named_apart = here is not None and len(others) == group.world_size - 1
        reaches = named_apart and all(torch.cuda.can_device_access_peer(here, device) for device in others)
        answers = [False] * group.world_size
        dist.all_gather_object(answers, bool(same_machine and reaches), group=group.cpu_group)
        return cls(group.device_group) if all(answers) else None

    def buffers(self, name: str, nbytes: int) -> list[torch.Tensor]:
        """Each rank's buffer of this name, uint8 [nbytes]: the memory of the last call, unless that was too short."""
        handle = self._handles.get(name)
        if handle is None or handle.buffer_size < nbytes:
            assert not torch.cuda.is_current_stream_capturing(), "a graph is of a forward that has run before"
            if handle is not None:
                self._replaced.append(handle)
            handle = self._handles[name] = self._allocate(nbytes)
        return [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(handle.world_size)]

    def _allocate(self, nbytes: int) -> Any:
        import torch.distributed._symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda"))
        return symmetric_memory.rendezvous(buffer, self._group.group_name)

    def meet(self) -> None:
        """Let later kernels of this stream wait for the earlier ones of the others' streams."""
        handle = next(iter(self._handles.values()))
        handle.barrier(channel=0)
