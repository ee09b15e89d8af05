# SPDX-License-Identifier: Apache-2.0
"""One process a GPU under `torchrun`, or a single process: who one is, and how gradients become their mean."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Ranks:
    """rank of count; device: this process's own."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def join(cls, device: str | None = None) -> "Ranks":
        """Meet the other processes that `torchrun` started, if it did. device: `cpu` or `cuda`; None = what there is."""
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if count > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        return cls(rank, count, place)

    def mean_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the processes."""
        if self.count == 1:
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= self.count
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def same(self, value: float) -> float:
        """The first process's value, on every process."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)

    def spread(self, module: nn.Module) -> None:
        """Give every process the first one's parameters."""
        if self.count > 1:
            for parameter in module.parameters():
                dist.broadcast(parameter.data, 0)


class Clock:
    """How far a piece of training is, by wall time from the process's start."""

    def __init__(self, minutes: float) -> None:
        self.seconds, self.started = 60 * minutes, time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def fraction(self) -> float:
        return min(self.elapsed() / self.seconds, 1.0)
