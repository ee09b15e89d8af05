# SPDX-License-Identifier: Apache-2.0
"""Which committed chunks a prompt switch has to run again so that the K/V window follows the new prompt.

A frame's keys and values depend on the prompt, through the cross-attention of the layers below. The clean pass of every
chunk still in the window is run again, oldest first, into a second window that replaces the first when the chunk
succeeds. What a family remembers of a chunk is its own; this file needs only its frames.
Held by tests/model_executor/models/lingbot_world/test_lingbot_replay.py.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.sessions.snapshot import SavedTensors


class HasFrames(Protocol):
    @property
    def frames(self) -> range: ...


P = TypeVar("P", bound=HasFrames)


def still_visible(past: Sequence[P], plan: ChunkPlan, next_frames: range) -> tuple[P, ...]:
    """Return the chunks of which chunk `next_frames` sees at least one frame, oldest first."""
    oldest = oldest_ring_frame(plan, next_frames)
    return tuple(chunk for chunk in past if chunk.frames.start < plan.sink_frames or chunk.frames.stop > oldest)


def saved_chunks(saved: SavedTensors, plan: ChunkPlan, next_chunk: int) -> list[int]:
    """Return the indices of the remembered chunks that a snapshot holds (`past.frame{first frame}...`), in order.

    The oldest ones are sinks' and lie at the stream's begin; the others are near its end.
    """
    reach = plan.window_frames + 1
    candidates = sorted({*range(min(next_chunk, reach)), *range(max(0, next_chunk - reach), next_chunk)})
    names = set(saved.names("past."))
    starts = {index: f"past.frame{plan.frames(index).start}" for index in candidates}
    return [
        index
        for index, start in starts.items()
        if start in names or any(name.startswith(start + ".") for name in names)
    ]


def oldest_ring_frame(plan: ChunkPlan, next_frames: range) -> int:
    """Return the first frame behind the sinks that chunk `next_frames` sees; 0 while it sees everything."""
    if next_frames.stop <= plan.window_frames:
        return 0
    return next_frames.stop - (plan.window_frames - plan.sink_frames)


def rebuilt_from(past: Sequence[HasFrames]) -> int:
    """Return the frame from which on `past` has no gap: ring frames before it are not in a rebuilt window."""
    start = past[-1].frames.start
    for chunk in reversed(past):
        if chunk.frames.stop < start:
            break
        start = chunk.frames.start
    return start
