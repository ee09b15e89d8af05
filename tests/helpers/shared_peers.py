# SPDX-License-Identifier: Apache-2.0
"""`SharedPeers` replaces `PeerMemory` for ranks on a CPU.

The ranks share files instead of GPU memory.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from vllm_omni.model_executor.layers.collectives.peer_memory import PeerMemory


class SharedPeers(PeerMemory):
    """Peer memory backed by files that every rank maps.

    Args:
        path: Prefix of the files' paths. All ranks use the same prefix.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._made: dict[str, list[torch.Tensor]] = {}

    def buffers(self, name: str, nbytes: int) -> list[torch.Tensor]:
        made = self._made.get(name)
        if made is None or made[0].numel() < nbytes:
            paths = [
                f"{self._path}.{name.replace(' ', '_')}.{nbytes}.{rank}"
                for rank in range(dist.get_world_size())
            ]
            if dist.get_rank() == 0:
                for path in paths:
                    Path(path).write_bytes(bytes(nbytes))
            dist.barrier()
            made = [
                torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths
            ]
            self._made[name] = made
        return [buffer[:nbytes] for buffer in made]

    def barrier(self) -> None:
        dist.barrier()
