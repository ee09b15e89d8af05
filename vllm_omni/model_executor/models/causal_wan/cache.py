# SPDX-License-Identifier: Apache-2.0
"""`ChunkCache`: the earlier chunks' K/V that a denoise step attends to.

There are two modes, both built on `KVWindow`s:

- strict: one window. A chunk's clean-context pass writes the K/V that later chunks attend to.
- noise-matched: one window per denoise step. Step j of a chunk attends to the K/V that earlier
  chunks wrote at their own step j. After the stream's first chunk, every window contains the K/V
  that this chunk wrote in its last step.

In both modes, results depend only on frame indices and steps. Running chunks concurrently produces
the same result as running them one after another, if the K/V that a step reads have already been
written. Frames are committed only when `commit` is called.
"""

# T tokens of a chunk, S visible tokens, N heads, H head dim

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.layers.kv_cache.sink_window import SinkWindow
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.layers.kv_cache.window_set import WindowSet


class ChunkCache(WindowSet):
    """A stream's K/V windows; see the module docstring. Use `strict` or `noise_matched` to build a
    cache.

    In strict mode, `windows` contains one window. In noise-matched mode, it contains one window per
    step or, on a stage that owns one step, only that step's window. `has_sinks_per_step` is set if
    each step's window has its own sink frames.
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
        """Return the window that the forward pass of `step` reads and writes."""
        return self.windows[min(step, len(self.windows) - 1)]

    def open(self, frames: range, step: int = 0) -> None:
        """Write the sink slots for the chunk with `frames`. With per-step sinks, call this before
        every `step`, otherwise once per chunk.
        """
        for window in self._sink_windows(step):
            window.open(frames)

    def retain_sinks(self, frames: range, step: int) -> None:
        """Store the sink frames among `frames` after `step`, because a later chunk may need them.
        This method is used only with per-step sinks.

        The stream's first chunk is excluded, because the K/V of its last step replace those of the
        other steps.
        """
        for window in self._sink_windows(step):
            if 0 < frames.start < window.sink_frames:
                window.retain_sinks(frames)

    def recompute(self, first_frame: int) -> "ChunkCache":
        """Return a fork that hides all frames before `first_frame`.

        The caller must then rewrite `first_frame` and all later frames, oldest first. Recomputation
        requires strict mode.
        """
        other = self.fork()
        other.clean.hide_before(first_frame)
        return other

    def keep_sinks(self, frames: range) -> None:
        """Store the sink frames among `frames` after a clean-context pass has rewritten
        `frames`.
        """
        for window in self._sink_windows(0):
            if frames.start < window.sink_frames:
                window.retain_sinks(frames)

    def resemblances(self, end_frame: int, step: int = 0) -> torch.Tensor | None:
        """Return this rank's sums [windows, L, S, 2, 3], from which `decide` chooses the sink
        frames to replace. Return None unless there are sink windows and all of them have sums.

        With per-step sinks, call this after the forward pass of `step`. Otherwise, call it after a
        chunk's last forward pass.
        """
        sums = [window.resemblance(end_frame) for window in self._sink_windows(step)]
        known = [values for values in sums if values is not None]
        return torch.stack(known) if known and len(known) == len(sums) else None

    def decide(self, end_frame: int, sums: torch.Tensor, step: int = 0) -> None:
        """Decide which sink frames to replace, based on the `resemblances` summed over all ranks
        that shard the heads.
        """
        for window, values in zip(self._sink_windows(step), sums, strict=True):
            window.decide(end_frame, values)

    def commit(self, end_frame: int) -> None:
        first = self.committed_frames == 0
        if self.has_sinks_per_step and first:
            for window in self.windows[:-1]:
                window.take_first_frames(self.clean, end_frame)
        for window in self.windows:
            window.commit(end_frame, retained_sinks=self.has_sinks_per_step and not first)

    def _sink_windows(self, step: int) -> list[SinkWindow]:
        windows = (
            [self.windows[min(step, len(self.windows) - 1)]]
            if self.has_sinks_per_step
            else self.windows
        )
        return [window for window in windows if isinstance(window, SinkWindow)]
