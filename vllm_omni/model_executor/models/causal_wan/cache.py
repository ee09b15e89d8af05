# SPDX-License-Identifier: Apache-2.0
"""`ChunkCache`: which keys and values a chunk's denoise step sees of the chunks before it.

Three semantics over the same `KVWindow`s:

- strict: one window. A chunk's last pass, over its clean latents, leaves what later chunks see.
- noise-matched: a window for every denoise step. Step j of a chunk sees what earlier chunks were at step j. After the
  stream's first chunk, every window holds that chunk as its last step left it.
- cascaded: a window for every step and one for the clean pass. Step j sees the m-th chunk before as it was at its step
  min(j + m * offset, clean). The windows of early steps are only as long as anybody looks back at them.

Each is a function of frame indices and steps alone, so chunks may run one after the other or several at once, as long
as what a step reads has been written; the result is the same. Nothing is committed before `commit`.
Held by tests/model_executor/models/causal_wan/test_cache.py.
"""

# T tokens of a chunk, S visible tokens, N heads, H head dim

from collections.abc import Callable, Sequence

import torch

from vllm_omni.model_executor.layers.kv_cache import KVWindow
from vllm_omni.model_executor.layers.sink_window import SinkWindow
from vllm_omni.model_executor.models.wan.layers import KVView
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.sessions.snapshot import SavedTensors

MakeWindow = Callable[[int, int, int], KVWindow]
"""(window_frames, sink_frames, spare_frames) -> an empty window of the model's sizes."""


class ChunkCache:
    """See the module docstring. Build with `strict`, `noise_matched` or `cascaded`.

    windows: one for strict; one a step for noise-matched (on a stage that owns one step, that step's only); one a step,
    then the clean one, for cascaded.
    has_sinks_per_step: every step has a window of its own with sinks of its own.
    """

    def __init__(self, windows: Sequence[KVWindow], views: Sequence[KVView], has_sinks_per_step: bool) -> None:
        self.windows = tuple(windows)
        self._views = tuple(views)
        self.has_sinks_per_step = has_sinks_per_step

    @classmethod
    def strict(cls, window: KVWindow) -> "ChunkCache":
        return cls([window], [window], False)

    @classmethod
    def noise_matched(cls, windows: Sequence[KVWindow]) -> "ChunkCache":
        return cls(windows, windows, True)

    @classmethod
    def cascaded(
        cls,
        plan: ChunkPlan,
        num_steps: int,
        offset: int,
        make_window: MakeWindow,
        spare_frames: Sequence[int] | None = None,
    ) -> "ChunkCache":
        """spare_frames: of each window (`KVWindow`); None = none."""
        lengths = cascade_frames(plan, num_steps, offset)
        *spares, clean_spares = spare_frames or [0] * (num_steps + 1)
        windows = [make_window(frames, 0, spare) for frames, spare in zip(lengths, spares, strict=True)]
        windows.append(make_window(plan.window_frames, plan.sink_frames, clean_spares))
        return cls(
            windows, [*(CascadeView(windows, step, offset, plan) for step in range(num_steps)), windows[-1]], False
        )

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

    def at(self, step: int) -> KVView:
        """Return what the forward of `step` writes to and sees."""
        return self._views[min(step, len(self._views) - 1)]

    def check_fits(self, frames: range) -> None:
        """Raise `RequestFailed` if chunk `frames` can not be served."""
        self.clean.check_fits(frames)

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

    def commit(self, frames: range) -> None:
        """Make chunk `frames` part of the stream."""
        first = frames.start == 0
        if self.has_sinks_per_step and first:
            part = slice(0, frames.stop * self.clean.tokens_per_frame)
            for window in self.windows[:-1]:
                window.buffer[:, :, part].copy_(self.clean.buffer[:, :, part])
        for window in self.windows:
            window.commit(frames.stop, sinks_kept=self.has_sinks_per_step and not first)

    def tensors(self, next_frames: int) -> dict[str, torch.Tensor]:
        """Return every tensor that a next chunk of `next_frames` can see, by stable name."""
        if len(self.windows) == 1:
            return self.clean.tensors(next_frames)
        return {
            f"step{step}.{name}": tensor
            for step, window in enumerate(self.windows)
            for name, tensor in window.tensors(next_frames).items()
        }

    @property
    def written_from(self) -> int:
        return self.clean.written_from

    def restore(self, saved: SavedTensors, committed_frames: int, written_from: int, next_frames: int) -> None:
        """Fill a new cache with what `tensors(next_frames)` of another one named. Raises `RequestFailed`."""
        for step, window in enumerate(self.windows):
            part = saved if len(self.windows) == 1 else saved.under(f"step{step}.")
            window.restore(part, committed_frames, written_from, next_frames)

    def fork(self) -> "ChunkCache":
        return self._with([window.fork() for window in self.windows])

    def rebuild(self, written_from: int) -> "ChunkCache":
        """Return an empty cache of the same kind, to be filled again; strict only."""
        assert len(self.windows) == 1
        return ChunkCache.strict(self.clean.rebuild(written_from))

    def to(self, device: torch.device | str) -> None:
        for window in self.windows:
            window.to(device)

    def close(self) -> None:
        for window in self.windows:
            window.close()

    def keep_sinks(self, frames: range) -> None:
        """Take over the sinks among `frames` from the buffers (a cache that is being rebuilt, after such a chunk)."""
        for window in self._sink_windows(0):
            if frames.start < window.sink_frames:
                window.keep_sinks(frames)

    def _sink_windows(self, step: int) -> list[SinkWindow]:
        windows = [self.windows[min(step, len(self.windows) - 1)]] if self.has_sinks_per_step else self.windows
        return [window for window in windows if isinstance(window, SinkWindow)]

    def _with(self, windows: Sequence[KVWindow]) -> "ChunkCache":
        views = [view.over(windows) if isinstance(view, CascadeView) else None for view in self._views]
        return ChunkCache(
            windows,
            [view or windows[index] for index, view in enumerate(views)],
            self.has_sinks_per_step,
        )


class CascadeView:
    """What one step of a cascaded chunk writes (its own window) and sees (a piece of several windows, gathered)."""

    def __init__(self, windows: Sequence[KVWindow], step: int, offset: int, plan: ChunkPlan) -> None:
        self._windows, self._step, self._offset, self._plan = tuple(windows), step, offset, plan
        self._seen: tuple[range, list[tuple[KVWindow, torch.Tensor]]] | None = None

    def over(self, windows: Sequence[KVWindow]) -> "CascadeView":
        return CascadeView(windows, self._step, self._offset, self._plan)

    def write(self, layer: int, frames: range, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        self._windows[self._step].write(layer, frames, k_TNH, v_TNH)

    def visible(self, layer: int, frames: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies `(k_SNH, v_SNH)`, newest chunk first."""
        if self._seen is None or self._seen[0] != frames:
            self._seen = (frames, self._pieces(frames))
        pieces = [window.buffer[layer].index_select(1, index) for window, index in self._seen[1]]
        k, v = torch.cat(pieces, dim=1).unbind(0)
        return k, v

    def graph_key(self, frames: range) -> None:
        """Places of the pieces are computed for each chunk."""

    def _pieces(self, frames: range) -> list[tuple[KVWindow, torch.Tensor]]:
        left = set(self._windows[-1].visible_frames(frames.stop))
        pieces = []
        chunk: range | None = frames
        step, clean = self._step, len(self._windows) - 1
        while chunk is not None and step < clean:
            seen = [frame for frame in chunk if frame in left]
            if seen:
                pieces.append(self._piece(self._windows[step], seen))
            left.difference_update(seen)
            chunk, step = self._plan.chunk_before(chunk), step + self._offset
        if left:
            pieces.append(self._piece(self._windows[clean], sorted(left)))
        return pieces

    @staticmethod
    def _piece(window: KVWindow, frames: list[int]) -> tuple[KVWindow, torch.Tensor]:
        return window, window.token_positions([window.slot(frame) for frame in frames])


def cascade_frames(plan: ChunkPlan, num_steps: int, offset: int) -> list[int]:
    """Return the frames that the window of each step must hold: as many chunks as any step looks back at it.

    Without sinks nobody looks back further than the stream's window.
    """
    chunk = max(plan.first_chunk_frames, plan.chunk_frames)
    lengths = [(step // offset + 1) * chunk for step in range(num_steps)]
    keeps_sinks = 0 < plan.sink_frames < plan.window_frames
    return lengths if keeps_sinks else [min(plan.window_frames, length) for length in lengths]
