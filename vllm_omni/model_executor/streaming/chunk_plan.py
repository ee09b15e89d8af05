# SPDX-License-Identifier: Apache-2.0
"""`ChunkPlan`: the latent frames, the attention window and the video frames of each chunk in a
stream.
"""

from dataclasses import dataclass, replace
from typing import Protocol, Self

from vllm_omni.model_executor.streaming.options import StreamingOptions


@dataclass(frozen=True)
class FrameRate:
    """Number of video frames per latent frame."""

    first: int
    """Number of video frames that the first latent frame of a stream decodes to."""
    later: int
    """Number of video frames that every later latent frame decodes to."""

    def first_frame(self, latent_frame: int) -> int:
        """Return the absolute index of the first video frame that a latent frame decodes to."""
        return self.first + self.later * (latent_frame - 1) if latent_frame else 0


CAUSAL_VIDEO = FrameRate(first=1, later=4)
"""Frame rate of a causal video autoencoder: latent frame 0 decodes to video frame 0, and latent
frame i > 0 decodes to video frames 4i - 3 to 4i.
"""

GLOBAL_FRAMES = 21
"""Maximum number of latent frames in a stream with global attention: the length of the training
clips.
"""


class StatesWindow(Protocol):
    """Chunk and window sizes that a checkpoint may recommend. A size without a recommendation is
    None.
    """

    @property
    def window_frames(self) -> int | None: ...

    @property
    def sink_frames(self) -> int | None: ...

    @property
    def frames_per_chunk(self) -> int | None: ...


@dataclass(frozen=True)
class ChunkPlan:
    """Sizes of a stream's chunks, in latent frames.

    Raises:
        ValueError: The first chunk does not fit into the window.
    """

    first_chunk_frames: int
    """Length of the first chunk, in latent frames."""
    chunk_frames: int
    """Length of every chunk except the first, in latent frames."""
    window_frames: int
    """Number of latent frames that a chunk attends to, including the sink frames and the chunk
    itself.
    """
    sink_frames: int
    """Number of latent frames at the start of the stream that are never evicted. For global
    attention, which evicts no frames, this number equals `window_frames`.
    """
    rate: FrameRate = CAUSAL_VIDEO
    """Number of video frames per latent frame."""

    def __post_init__(self) -> None:
        first, window = self.first_chunk_frames, self.window_frames
        if first > window:
            raise ValueError(
                f"the first chunk of {first} latent frames does not fit a window of {window}"
            )

    @property
    def shortest_window(self) -> int:
        """Minimum length of a window that grows with its session (`omni.kv_growth`).

        The minimum has room for a chunk and its predecessor, because motion would not continue
        without the previous chunk. A window that evicts no frames always grows to its full length.
        """
        if self.sink_frames == self.window_frames:
            return self.window_frames
        return min(self.window_frames, max(self.first_chunk_frames, 2 * self.chunk_frames))

    def shortened(self, window_frames: int) -> Self:
        """Return the plan with a window of `window_frames`, which must be at least
        `shortest_window` and at most the current length.

        The shorter window keeps as many sink frames as fit in addition to two chunks.
        """
        sink_frames = min(self.sink_frames, max(0, window_frames - 2 * self.chunk_frames))
        return replace(self, window_frames=window_frames, sink_frames=sink_frames)

    def frames(self, chunk_index: int) -> range:
        """Return the absolute indices of a chunk's latent frames."""
        if chunk_index == 0:
            return range(self.first_chunk_frames)
        start = self.first_chunk_frames + (chunk_index - 1) * self.chunk_frames
        return range(start, start + self.chunk_frames)

    def past_chunks(self, chunk_index: int) -> list[range]:
        """Return the latent frames of the earlier chunks in a chunk's window, oldest first.

        Sink frames are excluded once frames between the sink frames and the rest of the window have
        been evicted.
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
        """Return the absolute indices of a chunk's video frames.

        For example, if chunks have 3 latent frames, the first chunk decodes to 9 video frames and
        every later chunk to 12.
        """
        frames = self.frames(chunk_index)
        return range(self.rate.first_frame(frames.start), self.rate.first_frame(frames.stop))


def first_pixel_frame(latent_frame: int) -> int:
    """Return the index of the first video frame that a latent frame decodes to (`CAUSAL_VIDEO`)."""
    return CAUSAL_VIDEO.first_frame(latent_frame)


def resolve_chunks(
    options: StreamingOptions,
    stated: StatesWindow,
    *,
    chunk_frames: int,
    window_frames: int,
    sink_frames: int,
) -> ChunkPlan:
    """Return the chunk plan of a server.

    Options take precedence over the checkpoint's recommendations, which take precedence over the
    defaults.

    Args:
        options: Streaming options of the server.
        stated: Chunk and window sizes recommended by the checkpoint.
        chunk_frames: Default length of a chunk, in latent frames.
        window_frames: Default length of the window, in latent frames.
        sink_frames: Default number of sink frames.

    Raises:
        ValueError: The chunks and the sink frames do not fit into the window.
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
    """Check that a sliding window has room for a chunk in addition to the sink frames.

    Raises:
        ValueError: The window has no room for a chunk.
    """
    if sink_frames + chunk_frames > window_frames:
        raise ValueError(
            f"a window of {window_frames} latent frames with {sink_frames} sink frames leaves no "
            "room for chunks of "
            f"{chunk_frames}; need sink_frames + latent_frames_per_chunk <= window_frames"
        )
