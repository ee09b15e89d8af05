# SPDX-License-Identifier: Apache-2.0
"""What a chunk with a smaller window sees: sinks and the newest half, while the window itself stays whole."""

import pytest
import torch

from vllm_omni.model_executor.layers.kv_cache import KVWindow
from vllm_omni.model_executor.layers.narrow_view import NarrowView, narrow_frames

TOKENS = 2


def filled(window_frames: int, sink_frames: int, chunk: int, chunks: int) -> tuple[KVWindow, range]:
    """A window in which every key is its frame's number, and the newest chunk."""
    window = KVWindow(
        num_layers=1,
        window_frames=window_frames,
        sink_frames=sink_frames,
        tokens_per_frame=TOKENS,
        num_heads=1,
        head_dim=4,
        dtype=torch.float32,
        device="cpu",
    )
    frames = range(0)
    for index in range(chunks):
        frames = range(index * chunk, (index + 1) * chunk)
        keys = torch.tensor(frames, dtype=torch.float32).repeat_interleave(TOKENS).view(-1, 1, 1).expand(-1, 1, 4)
        NarrowView(window).write(0, frames, keys, -keys)
        if index + 1 < chunks:
            window.commit(frames.stop)
    return window, frames


def seen_frames(view: KVWindow | NarrowView, frames: range) -> list[int]:
    keys, values = view.visible(0, frames)
    assert torch.equal(keys, -values)
    return sorted({int(key) for key in keys[:, 0, 0].tolist()})


@pytest.mark.parametrize(
    ("window_frames", "sink_frames", "chunk", "chunks", "expected"),
    [
        (12, 0, 3, 6, [12, 13, 14, 15, 16, 17]),
        (9, 3, 3, 6, [0, 1, 2, 15, 16, 17]),
        (10, 2, 2, 7, [0, 1, 10, 11, 12, 13]),
        (5, 1, 1, 9, [0, 7, 8]),
        (12, 0, 3, 2, [0, 1, 2, 3, 4, 5]),
        (12, 3, 3, 1, [0, 1, 2]),
    ],
)
def test_a_chunk_sees_sinks_and_the_newest_half(
    window_frames: int, sink_frames: int, chunk: int, chunks: int, expected: list[int]
) -> None:
    """And everything while there is no more than that; the window goes on showing all."""
    window, frames = filled(window_frames, sink_frames, chunk, chunks)
    assert seen_frames(NarrowView(window), frames) == expected
    whole = [*range(sink_frames), *range(max(sink_frames, frames.stop - window.ring_frames), frames.stop)]
    assert seen_frames(window, frames) == [frame for frame in whole if frame < frames.stop]


def test_a_chunk_always_sees_itself() -> None:
    """Half of a window that is hardly longer than a chunk would be less."""
    assert narrow_frames(4, 3) == 3
    window, frames = filled(5, 1, 3, 4)
    assert seen_frames(NarrowView(window), frames) == [0, 9, 10, 11]
