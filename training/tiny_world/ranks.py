# SPDX-License-Identifier: Apache-2.0
"""Processes under `torchrun` (one per GPU) or a single process, and gradient averaging across
them.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the torchrun processes, or the only rank if torchrun is not used.
    `device` is the device of this process.
    """

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, device: str | None = None) -> "Ranks":
        """Join the other processes, if there are any.

        Args:
            device: `cpu` or `cuda`. Default: CUDA if available.
        """
        world, local = (
            int(os.environ.get("WORLD_SIZE", "1")),
            int(os.environ.get("LOCAL_RANK", "0")),
        )
        cuda = torch.cuda.is_available() if device is None else device == "cuda"
        position = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(position)
        if world > 1 and not distributed.is_initialized():
            distributed.init_process_group(
                "nccl" if cuda else "gloo", device_id=position if cuda else None
            )
        return cls(int(os.environ.get("RANK", "0")), world, position)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace each gradient with its mean over the ranks."""
        if self.world == 1:
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(flat)
        flat /= self.world
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(
            grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]
        )

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return the values of the first rank on all ranks."""
        if self.world == 1:
            return list(values)
        sent = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.broadcast(sent, 0)
        return [float(value) for value in sent.tolist()]

    def share(self, module: nn.Module) -> None:
        """Copy the first rank's parameters to all ranks."""
        if self.world > 1:
            for parameter in module.parameters():
                distributed.broadcast(parameter.data, 0)

    def destroy_group(self) -> None:
        if self.world > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


class Clock:
    """Progress of one training run, measured by wall time since the clock was created."""

    def __init__(self, minutes: float) -> None:
        self.seconds, self.started = 60 * minutes, time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def fraction(self) -> float:
        return min(self.elapsed() / self.seconds, 1.0)
