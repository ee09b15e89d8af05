# SPDX-License-Identifier: Apache-2.0
"""`NarrowView`: a `KVWindow` as a chunk sees it that goes with a smaller window (`omni.degradations`).

The window itself is as it always is: the chunk writes its K/V to their places, and the next chunk may look at all of it
again. Only what this chunk attends to is less: the sinks, where they stand for the whole window, and the newest half of
the frames behind them. Held by tests/model_executor/layers/test_narrow_view.py and the causal Wan tests.
"""

# T tokens of a chunk, S visible tokens, N heads, H head dim

import torch

from vllm_omni.model_executor.layers.kv_cache import KVWindow


def narrow_frames(ring_frames: int, chunk_frames: int) -> int:
    """Return how many frames behind the sinks a chunk sees then: half of them, at least itself."""
    return max(chunk_frames, ring_frames // 2)


class NarrowView:
    """Writes to `window`, sees a part of it; of use for one chunk."""

    def __init__(self, window: KVWindow) -> None:
        self._window = window
        self._seen: tuple[range, torch.Tensor | None] | None = None

    def write(self, layer: int, frames: range, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        self._window.write(layer, frames, k_TNH, v_TNH)

    def visible(self, layer: int, frames: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(k_SNH, v_SNH)` that chunk `frames`, already written, attends to: copies, oldest first."""
        if self._seen is None or self._seen[0] != frames:
            self._seen = (frames, self._tokens(frames))
        index = self._seen[1]
        if index is None:
            return self._window.visible(layer, frames)
        k, v = self._window.buffer[layer].unbind(0)
        return k.index_select(0, index), v.index_select(0, index)

    def graph_key(self, frames: range) -> None:
        """What is seen is gathered for this chunk alone."""

    def _tokens(self, frames: range) -> torch.Tensor | None:
        """Positions of the tokens that are seen; None: the chunk has no more behind it anyway."""
        window = self._window
        visible = window.visible_frames(frames.stop)
        sinks = [frame for frame in visible if frame < window.sink_frames]
        newest = visible[len(sinks) :][-narrow_frames(window.ring_frames, len(frames)) :]
        if len(sinks) + len(newest) == len(visible):
            return None
        return window.token_positions([window.slot(frame) for frame in (*sinks, *newest)])
