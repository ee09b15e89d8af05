# SPDX-License-Identifier: Apache-2.0
"""`WindowSet`: several `KVWindow`s of one stream, kept, saved, copied and moved together.

Held by tests/model_executor/models/causal_wan/test_cache.py and
tests/model_executor/models/lingbot_world/test_lingbot_pretrain.py.
"""

import copy
from collections.abc import Mapping
from typing import Self

import torch

from vllm_omni.model_executor.layers.kv_cache import KVWindow
from vllm_omni.saved_tensors import SavedTensors


class WindowSet:
    """by_name: a window's name is the prefix of its tensors' names; the last one's length is the stream's."""

    def __init__(self, by_name: Mapping[str, KVWindow]) -> None:
        self.by_name = dict(by_name)

    @property
    def windows(self) -> tuple[KVWindow, ...]:
        return tuple(self.by_name.values())

    @property
    def clean(self) -> KVWindow:
        """The window whose length and sinks are the stream's."""
        return self.windows[-1]

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self.windows)

    @property
    def device(self) -> torch.device:
        return self.clean.device

    @property
    def committed_frames(self) -> int:
        return self.clean.committed_frames

    def check_fits(self, frames: range) -> None:
        """Raise `RequestFailed` if chunk `frames` can not be served."""
        self.clean.check_fits(frames)

    def commit(self, end_frame: int) -> None:
        """Make frames up to `end_frame` part of the stream."""
        for window in self.windows:
            window.commit(end_frame)

    def tensors(self, next_frames: int) -> dict[str, torch.Tensor]:
        """Return every tensor that a next chunk of `next_frames` can see, by stable name."""
        return {
            f"{prefix}{name}": tensor
            for prefix, window in self.by_name.items()
            for name, tensor in window.tensors(next_frames).items()
        }

    def restore(self, saved: SavedTensors, committed_frames: int, next_frames: int) -> None:
        """Fill new windows with the tensors named by `tensors(next_frames)` of others. Raises `RequestFailed`."""
        for prefix, window in self.by_name.items():
            window.restore(saved.under(prefix), committed_frames, next_frames)

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        """The tensors that forwards read and write in place."""
        return tuple(place for window in self.windows for place in window.places)

    def __copy__(self) -> Self:
        """Hold the same memory, also when this one has given it back."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.by_name = {prefix: copy.copy(window) for prefix, window in self.by_name.items()}
        return other

    def fork(self) -> Self:
        other = copy.copy(self)
        other.by_name = {prefix: window.fork() for prefix, window in self.by_name.items()}
        return other

    def to(self, device: torch.device | str) -> None:
        for window in self.windows:
            window.to(device)

    def close(self) -> None:
        for window in self.windows:
            window.close()
