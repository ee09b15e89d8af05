# SPDX-License-Identifier: Apache-2.0
"""How a stream is cut into chunks of latent frames, what each chunk sees, and which video frames it becomes.

Held by tests/model_executor/models/lingbot_world/test_lingbot_config.py.
"""

from dataclasses import dataclass

LATENT_CHANNELS = 16
VAE_SPATIAL = 8
VAE_TEMPORAL = 4
"""Of Wan 2.1's autoencoder: channels of a latent, pixels per latent cell, video frames per latent (1 for the first)."""


@dataclass(frozen=True)
class WanChunkPlan:
    """Lengths in latent frames. window_frames: what a chunk sees, sinks and itself included.

    sink_frames == window_frames: global attention, nothing is evicted. Raises ValueError if the parts do not fit.
    """

    first_chunk_frames: int
    chunk_frames: int
    window_frames: int
    sink_frames: int
    max_attention_frames: int | None = None

    def __post_init__(self) -> None:
        first, chunk, window = self.first_chunk_frames, self.chunk_frames, self.window_frames
        if first > window:
            raise ValueError(f"the first chunk of {first} latent frames does not fit a window of {window}")
        if (limit := self.max_attention_frames) is not None and limit < max(chunk, first):
            raise ValueError(f"max_attention_frames {limit} is smaller than a chunk of {max(chunk, first)}")

    def frames(self, chunk_index: int) -> range:
        """Return the latent frames of a chunk, by absolute index."""
        if chunk_index == 0:
            return range(self.first_chunk_frames)
        start = self.first_chunk_frames + (chunk_index - 1) * self.chunk_frames
        return range(start, start + self.chunk_frames)

    def chunk_before(self, frames: range) -> range | None:
        """Return the latent frames of the chunk before chunk `frames`; None before the first."""
        if frames.start == 0:
            return None
        start = max(0, frames.start - self.chunk_frames) if frames.start > self.first_chunk_frames else 0
        return range(start, frames.start)

    def pixel_frames(self, chunk_index: int) -> range:
        """Return the video frames a chunk decodes to, by absolute index: 9 for a first chunk of 3 latents, 12 later."""
        frames = self.frames(chunk_index)
        return range(first_pixel_frame(frames.start), first_pixel_frame(frames.stop))


def first_pixel_frame(latent_frame: int) -> int:
    """Return the first video frame of a latent frame: latent 0 is frame 0, latent i > 0 is frames 4i - 3 .. 4i."""
    return max(0, VAE_TEMPORAL * (latent_frame - 1) + 1)


def check_sliding(window_frames: int, sink_frames: int, chunk_frames: int) -> None:
    """Raise ValueError if a window that slides leaves a chunk no room beside its sinks."""
    if sink_frames + chunk_frames > window_frames:
        raise ValueError(
            f"a window of {window_frames} latent frames with {sink_frames} sink frames leaves no room for chunks of "
            f"{chunk_frames}; need sink_frames + latent_frames_per_chunk <= window_frames"
        )
