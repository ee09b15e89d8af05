# SPDX-License-Identifier: Apache-2.0
"""`ClipCache`: latents of the clips `[image, grey, grey, ...]` that sessions with the same start
image share.
"""

# C channels, F latent frames, h, w latent cells, H, W pixels

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import torch

ClipKey = bytes
"""Digest of a start image and of the size of its session's frames."""
_MAX_CLIPS: Final = 16
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


class ClipCache:
    """Clips of recent start images. Their latents depend only on the image and the VAE's weights.

    A session adds the latent frames that it encodes. Once its conditioning has settled, the clip is
    complete, and later sessions with the same image do not run the encoder. The cache keeps the
    clips of the most recent images, which take a few MB each.
    """

    def __init__(self) -> None:
        self._encoded: OrderedDict[ClipKey, list[torch.Tensor]] = OrderedDict()
        self._complete: OrderedDict[ClipKey, torch.Tensor] = OrderedDict()

    def find(self, key: ClipKey) -> torch.Tensor | None:
        """Return a complete clip, fp32 [1, C, F, h, w], whose last frame all later frames equal.
        None: the clip is unknown or not complete.
        """
        clip_1CFhw = self._complete.get(key)
        if clip_1CFhw is not None:
            self._complete.move_to_end(key)
        return clip_1CFhw

    def add(self, key: ClipKey, position: int, latents: Sequence[torch.Tensor]) -> None:
        """Add the latent frames that a session has encoded, unless another session already has.

        Args:
            key: Key of the session's start image.
            position: Position in the clip of the first of these frames.
            latents: Latent frames, each fp32 [1, C, 1, h, w].
        """
        if position == 0 and key not in self._encoded:
            self._encoded[key] = []
            _limit(self._encoded)
        frames = self._encoded.get(key)
        if frames is not None and len(frames) == position <= MAX_FRAMES - len(latents):
            frames += latents

    def complete(self, key: ClipKey, num_frames: int) -> None:
        """Make a clip complete, whose conditioning has settled after `num_frames` latent frames."""
        frames = self._encoded.pop(key, [])
        if len(frames) >= num_frames:
            self._complete[key] = torch.cat(frames[:num_frames], dim=2)
            _limit(self._complete)

    def clear(self) -> None:
        """Evict all clips, because the VAE's weights change."""
        self._encoded.clear()
        self._complete.clear()


def _limit(
    clips: OrderedDict[ClipKey, list[torch.Tensor]] | OrderedDict[ClipKey, torch.Tensor],
) -> None:
    while len(clips) > _MAX_CLIPS:
        clips.popitem(last=False)
