# SPDX-License-Identifier: Apache-2.0
"""What one pipeline stage hands to the next beside hidden states, in the shapes that vLLM's worker carries.

vLLM's worker sends a dict of tensors and takes it that tensor-parallel ranks hold the same ones: a tensor whose length
divides over them travels in shards, one from each rank, joined at the other side. Under sequence parallelism each rank
has tokens of its own, and a host tensor cannot be joined at all. `together` gives what it packs a length that does not
divide.
Held by tests/worker/test_stage_messages.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from vllm_omni.outputs import RequestFailed

_NOTE = "note"
_LATENTS = "latents"


class ChunkNote(msgspec.Struct, frozen=True):
    """Where one chunk stands after a step. committed: how many other chunks its session has had by now.

    clean: its latents are final and travel beside this note; `facts` are the model's.
    done: the chunk is part of its session on the ranks that hold layers; `timings_ms` is what they have measured.
    """

    request_id: str
    committed: int
    step: int
    num_steps: int
    clean: bool
    done: bool
    facts: dict[str, Any] = {}
    timings_ms: dict[str, list[float]] = {}


class StageNote(msgspec.Struct, frozen=True):
    """What the last stage with layers tells the VAE stage after a step. failures: request -> (code, message)."""

    chunks: list[ChunkNote] = []
    failures: dict[str, tuple[str, str]] = {}

    def message(self, latents: Sequence[torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
        """The tensors to send. latents: of the clean `chunks`, in order. ranks: that share a stage's layers."""
        text = msgspec.json.encode(self)
        text += b" " * padding(len(text), ranks)
        return {_NOTE: torch.frombuffer(bytearray(text), dtype=torch.uint8), **together(_LATENTS, latents, ranks)}

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor]) -> "StageNote":
        return msgspec.json.decode(tensors[_NOTE].numpy().tobytes(), type=cls)

    @property
    def taking_part(self) -> set[str]:
        """The requests with a chunk that took this step, and has not failed."""
        return {chunk.request_id for chunk in self.chunks}

    def latents(self, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Request id -> final latents, of the clean `chunks`."""
        clean = [chunk.request_id for chunk in self.chunks if chunk.clean]
        return dict(zip(clean, unpack(_LATENTS, received), strict=True))

    def failure(self, request_id: str) -> RequestFailed | None:
        known = self.failures.get(request_id)
        return None if known is None else RequestFailed(*known)


def padding(length: int, ranks: int) -> int:
    """How much longer to make what `ranks` ranks may not cut into shards."""
    return -length % ranks + 1 if ranks > 1 else 0


def together(name: str, tensors: Sequence[torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
    """Any number of tensors of one type under `name`, such that each of `ranks` ranks sends its own to its counterpart.

    However many, they travel as two: vLLM's CPU ranks hand over eight at most.
    """
    if not tensors:
        return {}
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
    if ranks > 1 and flat.numel() % ranks == 0:
        flat = torch.cat((flat, flat.new_zeros(padding(flat.numel(), ranks))))
    numbers = [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]
    numbers += [-1] * padding(len(numbers), ranks)
    return {name: flat, f"{name}.shapes": torch.tensor(numbers, dtype=torch.int64)}


def unpack(name: str, received: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What `together` packed: views of one buffer."""
    if name not in received:
        return []
    numbers = [number for number in received[f"{name}.shapes"].tolist() if number >= 0]
    found, start, flat = [], 0, received[name]
    while numbers:
        dims, numbers = numbers[0], numbers[1:]
        shape, numbers = torch.Size(numbers[:dims]), numbers[dims:]
        found.append(flat[start : start + shape.numel()].view(shape))
        start += shape.numel()
    return found
