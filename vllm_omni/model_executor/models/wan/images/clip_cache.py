# SPDX-License-Identifier: Apache-2.0
"""`ClipCache`: latents of the clips `[image, grey, grey, ...]` that sessions with the same start
image share.
"""

# C channels, F latent frames, h, w latent cells, H, W pixels

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

ClipKey = bytes
"""Digest of a start image and of the size of its session's frames."""
_MAX_BYTES: Final = 64 << 20
MAX_FRAMES: Final = 64
"""Maximum number of latent frames in a clip."""


def clip_key(image: torch.Tensor, height: int, width: int) -> ClipKey:
    """Return the key of the clip that starts with an image.

    Args:
        image: Start image before it is resized, uint8 [H, W, 3] or float [3, H, W], in host memory.
        height: Height of the session's frames in pixels.
        width: Width of the session's frames in pixels.
    """
    described = repr((tuple(image.shape), image.dtype, height, width))
    digest = hashlib.blake2b(described.encode())
    digest.update(image.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


@dataclass
class _Clip:
    """The first latent frames of a clip."""

    frames: list[torch.Tensor] = field(default_factory=list)
    """Latent frames, each fp32 [1, C, 1, h, w]."""
    is_complete: bool = False
    """Whether all later frames equal the last one."""


class ClipCache:
    """Clips of recent start images. Their latents depend only on the image and the VAE's weights.

    A session adds the latent frames that it encodes. When it starts a chunk after its conditioning
    has settled, the clip becomes complete, and later sessions with the same image do not run the
    encoder. If all clips together exceed 64 MiB, those that have not been used for the longest time
    are evicted.
    """

    def __init__(self) -> None:
        self._clips: OrderedDict[ClipKey, _Clip] = OrderedDict()

    def find(self, key: ClipKey) -> torch.Tensor | None:
        """Return a complete clip, fp32 [1, C, F, h, w], whose last frame all later frames equal.
        None: the clip is unknown or not complete.
        """
        clip = self._clips.get(key)
        if clip is None or not clip.is_complete:
            return None
        self._clips.move_to_end(key)
        return torch.cat(clip.frames, dim=2)

    def add(self, key: ClipKey, position: int, latents: Sequence[torch.Tensor]) -> None:
        """Add the latent frames that a session has encoded, unless another session already has.

        Args:
            key: Key of the session's start image.
            position: Position in the clip of the first of these frames.
            latents: Latent frames, each fp32 [1, C, 1, h, w].
        """
        clip = self._clips.setdefault(key, _Clip())
        self._clips.move_to_end(key)
        if len(clip.frames) == position <= MAX_FRAMES - len(latents) and not clip.is_complete:
            clip.frames += latents
        while self.nbytes > _MAX_BYTES:
            self._clips.popitem(last=False)

    def complete(self, key: ClipKey, num_frames: int) -> None:
        """Make a clip complete, whose conditioning has settled after `num_frames` latent frames."""
        clip = self._clips.get(key)
        if clip is not None and len(clip.frames) >= num_frames and not clip.is_complete:
            del clip.frames[num_frames:]
            clip.is_complete = True

    def clear(self) -> None:
        """Evict all clips, because the VAE's weights change."""
        self._clips.clear()

    @property
    def nbytes(self) -> int:
        return sum(frame.nbytes for clip in self._clips.values() for frame in clip.frames)
