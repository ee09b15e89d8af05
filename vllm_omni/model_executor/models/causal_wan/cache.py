# SPDX-License-Identifier: Apache-2.0
"""`ChunkCache`: which keys and values a chunk's denoise step sees of the chunks before it.

Three semantics over the same `KVWindow`s:

- strict: one window. A chunk's last pass, over its clean latents, leaves the K/V that later chunks see.
- noise-matched: a window for every denoise step. Step j of a chunk sees earlier chunks as they were at step j. After
  the stream's first chunk, every window holds that chunk as its last step left it.

Each is a function of frame indices and steps alone, so chunks may run one after the other or several at once, as long
as the K/V that a step reads have been written; the result is the same. Nothing is committed before `commit`.
Held by tests/model_executor/models/causal_wan/test_cache.py.
"""

# T tokens of a chunk, S visible tokens, N heads, H head dim

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.layers.kv_cache import KVWindow
from vllm_omni.model_executor.layers.sink_window import SinkWindow
from vllm_omni.model_executor.layers.window_set import WindowSet


class ChunkCache(WindowSet):
    """See the module docstring. Build with `strict` or `noise_matched`.

    windows: one for strict; one a step for noise-matched (on a stage that owns one step, that step's only).
    has_sinks_per_step: every step has a window of its own with sinks of its own.
    """

    def __init__(self, windows: Sequence[KVWindow], has_sinks_per_step: bool) -> None:
        names = [""] if len(windows) == 1 else [f"step{step}." for step in range(len(windows))]
        super().__init__(dict(zip(names, windows, strict=True)))
        self.has_sinks_per_step = has_sinks_per_step

    @classmethod
    def strict(cls, window: KVWindow) -> "ChunkCache":
        return cls([window], False)

    @classmethod
    def noise_matched(cls, windows: Sequence[KVWindow]) -> "ChunkCache":
        return cls(windows, True)

    def at(self, step: int) -> KVWindow:
        """Return the window that the forward of `step` writes and reads."""
        return self.windows[min(step, len(self.windows) - 1)]

    def open(self, frames: range, step: int = 0) -> None:
        """Place the sinks for chunk `frames`, before the forward of `step`; without sinks per step, once a chunk."""
        for window in self._sink_windows(step):
            window.open(frames)

    def keep_own_sinks(self, frames: range, step: int) -> None:
        """After the forward of `step`, with sinks per step: keep those among `frames`, a later chunk may need them.

        Not of the stream's first chunk, whose K/V are replaced by the last step's.
        """
        for window in self._sink_windows(step):
            if 0 < frames.start < window.sink_frames:
                window.keep_sinks(frames)

    def recompute(self, first_frame: int) -> "ChunkCache":
        """Return a copy whose frames from `first_frame` on are to be written again, oldest first; strict only."""
        other = self.fork()
        other.clean.hide_before(first_frame)
        return other

    def keep_sinks(self, frames: range) -> None:
        """After a clean pass that wrote `frames` again: keep the sinks among them."""
        for window in self._sink_windows(0):
            if frames.start < window.sink_frames:
                window.keep_sinks(frames)

    def resemblances(self, end_frame: int, step: int = 0) -> torch.Tensor | None:
        """Return this rank's sums [windows, L, S, 2, 3] that decide which sinks are renewed, or None: nothing is.

        After the forward of `step`, with sinks per step; else after a chunk's last forward.
        """
        sums = [window.resemblance(end_frame) for window in self._sink_windows(step)]
        known = [values for values in sums if values is not None]
        return torch.stack(known) if known and len(known) == len(sums) else None

    def decide(self, end_frame: int, sums: torch.Tensor, step: int = 0) -> None:
        """Take the sums over all ranks that share the heads."""
        for window, values in zip(self._sink_windows(step), sums, strict=True):
            window.decide(end_frame, values)

    def commit(self, end_frame: int) -> None:
        first = self.committed_frames == 0
        if self.has_sinks_per_step and first:
            for window in self.windows[:-1]:
                window.take_first_frames(self.clean, end_frame)
        for window in self.windows:
            window.commit(end_frame, sinks_kept=self.has_sinks_per_step and not first)

    def _sink_windows(self, step: int) -> list[SinkWindow]:
        windows = [self.windows[min(step, len(self.windows) - 1)]] if self.has_sinks_per_step else self.windows
        return [window for window in windows if isinstance(window, SinkWindow)]
