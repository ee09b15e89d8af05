# SPDX-License-Identifier: Apache-2.0
"""How a stream is cut into chunks of latent frames, the window of each chunk, and the video frames
it becomes.

Held by tests/model_executor/models/lingbot_world/test_lingbot_config.py and
tests/model_executor/models/causal_wan/test_causal_wan_config.py.
"""

from dataclasses import dataclass
from typing import Protocol

from vllm_omni.model_executor.streaming.options import StreamingOptions


@dataclass(frozen=True)
class FrameRate:
    """Video frames of a latent frame: `first` of a stream's first one, `later` of every other."""

    first: int
    later: int

    def first_frame(self, latent_frame: int) -> int:
        """Return the first video frame of a latent frame, by absolute index."""
        return self.first + self.later * (latent_frame - 1) if latent_frame else 0


CAUSAL_VIDEO = FrameRate(first=1, later=4)
"""Of a causal video autoencoder: latent 0 is frame 0, latent i > 0 is frames 4i - 3 .. 4i."""

GLOBAL_FRAMES = 21
"""Latent frames of a stream with global attention: the length these models were trained on."""


class StatesWindow(Protocol):
    """The part of an architecture that a checkpoint may recommend; None = it does not."""

    @property
    def window_frames(self) -> int | None: ...

    @property
    def sink_frames(self) -> int | None: ...

    @property
    def frames_per_chunk(self) -> int | None: ...


@dataclass(frozen=True)
class ChunkPlan:
    """Lengths in latent frames. window_frames: those a chunk attends to, sinks and itself included.

    rate: the video frames that latent frames become. sink_frames == window_frames: global
    attention, nothing is evicted. Raises ValueError if the parts do not fit.
    """

    first_chunk_frames: int
    chunk_frames: int
    window_frames: int
    sink_frames: int
    rate: FrameRate = CAUSAL_VIDEO

    def __post_init__(self) -> None:
        first, window = self.first_chunk_frames, self.window_frames
        if first > window:
            raise ValueError(
                f"the first chunk of {first} latent frames does not fit a window of {window}"
            )

    def frames(self, chunk_index: int) -> range:
        """Return the latent frames of a chunk, by absolute index."""
        if chunk_index == 0:
            return range(self.first_chunk_frames)
        start = self.first_chunk_frames + (chunk_index - 1) * self.chunk_frames
        return range(start, start + self.chunk_frames)

    def past_chunks(self, chunk_index: int) -> list[range]:
        """Return the latent frames of the earlier chunks that a chunk sees, oldest first.

        Without sinks, once the window has moved away from them.
        """
        stop, first = self.frames(chunk_index).stop, 0
        if stop > self.window_frames > self.sink_frames:
            first = max(self.sink_frames, stop - (self.window_frames - self.sink_frames))
        chunks: list[range] = []
        while chunk_index and self.frames(chunk_index - 1).stop > first:
            chunk_index -= 1
            frames = self.frames(chunk_index)
            chunks.append(range(max(frames.start, self.sink_frames if first else 0), frames.stop))
        return chunks[::-1]

    def pixel_frames(self, chunk_index: int) -> range:
        """Return the video frames a chunk decodes to, by absolute index: 9 for a first chunk of
        3 latents, 12 later.
        """
        frames = self.frames(chunk_index)
        return range(self.rate.first_frame(frames.start), self.rate.first_frame(frames.stop))


def first_pixel_frame(latent_frame: int) -> int:
    """Return the first video frame of a latent frame of a causal video autoencoder."""
    return CAUSAL_VIDEO.first_frame(latent_frame)


def resolve_chunks(
    options: StreamingOptions,
    stated: StatesWindow,
    *,
    chunk_frames: int,
    window_frames: int,
    sink_frames: int,
) -> ChunkPlan:
    """Options win over the checkpoint, the checkpoint over the defaults given here.

    Raises ValueError.
    """
    chunk = options.latent_frames_per_chunk or stated.frames_per_chunk or chunk_frames
    first = options.first_chunk_latent_frames or chunk
    window = options.window_frames or stated.window_frames or window_frames
    if window == -1:
        window = sink = GLOBAL_FRAMES
    else:
        requested = (options.sink_frames, stated.sink_frames, sink_frames)
        sink = next(value for value in requested if value is not None)
        check_sliding(window, sink, chunk)
    return ChunkPlan(first, chunk, window, sink)


def check_sliding(window_frames: int, sink_frames: int, chunk_frames: int) -> None:
    """Raise ValueError if a window that slides leaves a chunk no room beside its sinks."""
    if sink_frames + chunk_frames > window_frames:
        raise ValueError(
            f"a window of {window_frames} latent frames with {sink_frames} sink frames leaves no "
            "room for chunks of "
            f"{chunk_frames}; need sink_frames + latent_frames_per_chunk <= window_frames"
        )
