# SPDX-License-Identifier: Apache-2.0
"""`WindowSet`: one stream's `KVWindow`s, which are committed, saved, copied and moved together."""

import copy
from collections.abc import Mapping
from typing import Self

import torch

from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.tensors.saved import SavedTensors


class WindowSet:
    """One stream's windows.

    Args:
        by_name: Windows, keyed by the prefix of their tensors' names. The last window defines the
            stream's committed frames.
    """

    def __init__(self, by_name: Mapping[str, KVWindow]) -> None:
        self.by_name = dict(by_name)

    @property
    def windows(self) -> tuple[KVWindow, ...]:
        return tuple(self.by_name.values())

    @property
    def clean(self) -> KVWindow:
        """The window that defines the stream's length and sink frames."""
        return self.windows[-1]

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self.windows)

    @property
    def growing_nbytes(self) -> int:
        """Return the number of bytes allocated to the windows that grow with their session."""
        return sum(window.growing_nbytes for window in self.windows)

    @property
    def held_frames(self) -> int:
        """Return the number of frames that have memory in every window."""
        return min(window.held_frames for window in self.windows)

    def missing_nbytes(self, end_frame: int) -> int:
        """Return the number of bytes that `grow(end_frame)` allocates."""
        return sum(window.missing_nbytes(end_frame) for window in self.windows)

    def grow(self, end_frame: int) -> None:
        """Allocate memory for all frames before `end_frame` that the windows hold.

        Raises:
            torch.OutOfMemoryError: There is not enough memory. Some windows may have grown.
        """
        for window in self.windows:
            window.grow(end_frame)

    def stop_growing(self, window_frames: int, sink_frames: int) -> None:
        """Shorten the windows; see `KVWindow.stop_growing`."""
        for window in self.windows:
            window.stop_growing(window_frames, sink_frames)

    @property
    def device(self) -> torch.device:
        return self.clean.device

    @property
    def committed_frames(self) -> int:
        return self.clean.committed_frames

    def check_frames(self, frames: range) -> None:
        """Raise `RequestFailed` if the windows cannot serve a chunk with these `frames`."""
        self.clean.check_frames(frames)

    def commit(self, end_frame: int) -> None:
        """Commit the frames before `end_frame` to the stream."""
        for window in self.windows:
            window.commit(end_frame)

    def tensors(self, next_frames: int) -> dict[str, torch.Tensor]:
        """Return, by stable name, every tensor that the next chunk, of `next_frames` frames, can
        see.
        """
        return {
            f"{prefix}{name}": tensor
            for prefix, window in self.by_name.items()
            for name, tensor in window.tensors(next_frames).items()
        }

    def restore(self, saved: SavedTensors, committed_frames: int, next_frames: int) -> None:
        """Fill new windows with the tensors that `tensors(next_frames)` of another set returned.

        Raises:
            RequestFailed: The tensors do not match these windows.
        """
        for prefix, window in self.by_name.items():
            window.restore(saved.under(prefix), committed_frames, next_frames)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that forward passes read and write in place."""
        return tuple(position for window in self.windows for position in window.buffers)

    def __copy__(self) -> Self:
        """Return a set of windows that refers to this set's memory, even after this set has been
        closed.
        """
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
