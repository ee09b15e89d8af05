# SPDX-License-Identifier: Apache-2.0
"""What one pipeline stage hands to the next beside hidden states, in the shapes that vLLM's worker carries.

vLLM's worker sends a dict of tensors and takes it that tensor-parallel ranks hold the same ones: a tensor whose length
divides over them travels in shards, one from each rank, joined at the other side. Under sequence parallelism each rank
has tokens of its own, and a host tensor cannot be joined at all. `whole` gives a tensor a length that does not divide.
Held by tests/worker/test_stage_messages.py.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from vllm_omni.outputs import RequestFailed

_NOTE = "note"


class ChunkNote(msgspec.Struct, frozen=True):
    """Where one chunk stands after a step. chunk: its index in the session.

    clean: its latents are final and travel beside this note, as `latents.{position}`; `facts` are the model's.
    done: the chunk is part of its session on the ranks that hold layers; `timings_ms` is what they have measured.
    """

    request_id: str
    chunk: int
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

    def message(self, latents: Mapping[int, torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
        """The tensors to send. latents: by position in `chunks`. ranks: how many share the layers of a stage."""
        text = msgspec.json.encode(self)
        text += b" " * (-len(text) % ranks + (ranks > 1))
        tensors = {_NOTE: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        for position, tensor in latents.items():
            tensors |= whole(f"latents.{position}", tensor, ranks)
        return tensors

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor]) -> "StageNote":
        return msgspec.json.decode(tensors[_NOTE].numpy().tobytes(), type=cls)

    def failure(self, request_id: str) -> RequestFailed | None:
        known = self.failures.get(request_id)
        return None if known is None else RequestFailed(*known)


def whole(name: str, tensor: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
    """`tensor` under `name`, such that each of `ranks` parallel ranks sends its own to its own counterpart."""
    if ranks == 1:
        return {name: tensor.contiguous()}
    shape = torch.tensor([*tensor.shape, *[-1] * (-tensor.dim() % ranks + 1)], dtype=torch.int64)
    flat = tensor.reshape(-1)
    if flat.numel() % ranks == 0:
        flat = torch.cat((flat, flat.new_zeros(1)))
    return {name: flat, f"{name}.shape": shape}


def unpack_whole(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What `whole` packed."""
    if f"{name}.shape" not in tensors:
        return tensors[name]
    shape = [size for size in tensors[f"{name}.shape"].tolist() if size >= 0]
    return tensors[name][: torch.Size(shape).numel()].view(shape)
