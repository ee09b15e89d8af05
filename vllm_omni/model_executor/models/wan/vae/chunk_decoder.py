# SPDX-License-Identifier: Apache-2.0
"""Decode a chunk's clean latents to video frames with Wan's decoder or the tiny decoder.

A decoder that also decoded the previous chunk continues from its features (`VAECache`), so a
stream's frames are equal to those of a clip that is decoded in one call. A decoder restarts if the
other decoder decoded the previous chunk, or if `continuation` is `restart` (as in PR 3701's
extensions). On a restart, the decoder first decodes the last latents before the chunk again and
discards the resulting frames, so the number of frames is the same as in an uninterrupted stream.
The accuracy of a restart depends on the decoder:

- The tiny decoder's output depends on `REACH` earlier latents, all of which are decoded again, so
  its frames are equal to those of an uninterrupted stream.
- The output of Wan's decoder depends on dozens of earlier latents, of which only `RESTART_LATENTS`
  are decoded again (one causal convolution depends on two). As a result, its frames are
  approximate, and the error fades as the stream continues. Decoding more latents again would be
  more accurate but slower.
"""

# C channels, F latent frames, h, w latent cells, T video frames, H, W pixels

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vllm_omni.model_executor.models.wan.vae.taehv import REACH
from vllm_omni.model_executor.models.wan.vae.tiny_vae import TinyVAEDecoder
from vllm_omni.model_executor.models.wan.vae.vae import (
    CacheLayout,
    Rounding,
    StreamingWanVAE,
    VAECache,
    to_uint8,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors

RESTART_LATENTS = 2
_JOINED_CELLS = 4096
"""Maximum number of latent cells per frame, summed over all streams decoded together. Above this
size, decoding is compute-bound.
"""


@dataclass(frozen=True, eq=False)
class DecoderState:
    """Immutable decoder state of a stream, shared by a session's forks."""

    cache: VAECache | None
    """Features of the decoder that decoded the last chunk. None if the next chunk requires a
    restart.
    """
    newest: torch.Tensor | None = None
    """The last latents, as many as a restart requires, fp32 [1, C, F, h, w]. None if no restart can
    occur.
    """
    tiny: bool = False
    """Whether the tiny decoder decoded the last chunk."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, keyed by their names in digests and snapshots. The names identify the
        decoder.
        """
        cache = {} if self.cache is None else self.cache.tensors()
        named = {f"{_TINY if self.tiny else ''}{name}": tensor for name, tensor in cache.items()}
        return named if self.newest is None else {**named, _NEWEST: self.newest}

    def to(self, device: torch.device | str) -> "DecoderState":
        cache = None if self.cache is None else self.cache.to(device)
        return DecoderState(
            cache, None if self.newest is None else self.newest.to(device), self.tiny
        )


_TINY, _NEWEST = "tiny.", "newest"


@dataclass(frozen=True)
class DecoderLayout:
    """Shapes of a stream's `DecoderState` on this rank."""

    latents: tuple[int, int, int]
    """Channel count, height and width of the latents for whole frames."""
    main: CacheLayout | None
    """Layout of the main decoder's cache. None if it has no cache on this rank."""
    tiny: CacheLayout | None
    """Layout of the tiny decoder's cache. None if the tiny decoder has no cache or is not loaded.
    """

    def restore(
        self, saved: SavedTensors, device: torch.device | str, num_latents: int
    ) -> DecoderState:
        """Restore the state saved after `num_latents` latent frames. The server that saved the
        state may have used other decoders.

        Raises:
            RequestFailed: A tensor is missing or has a different shape or dtype
                (`invalid_snapshot`). The message names the tensor.
        """
        newest = None
        shape = saved.shape(_NEWEST)
        if shape is not None:
            retained = shape[2] if len(shape) == 5 else 0
            if not 0 < retained <= min(REACH, num_latents):
                raise RequestFailed(
                    "invalid_snapshot", f"the snapshot's tensor decoder.{_NEWEST} is {shape}"
                )
            channels, *cells = self.latents
            newest = saved.take_tensor(
                _NEWEST, device, torch.float32, (1, channels, retained, *cells)
            )
        if saved.names(_TINY):
            if self.tiny is not None:
                return DecoderState(self.tiny.restore(saved.under(_TINY), device), newest, True)
            if newest is not None and self.main is not None:
                saved.skip_prefix(_TINY)  # no decoder on this server can continue from it
                return DecoderState(None, newest)
        if self.main is not None:
            return DecoderState(self.main.restore(saved, device), newest)
        if newest is None:
            raise RequestFailed(
                "invalid_snapshot", f"the snapshot lacks the tensor decoder.{_NEWEST}"
            )
        return DecoderState(None, newest)


class ChunkDecoder:
    """Decodes chunks of any session. This class does not store session state.

    Args:
        main: Autoencoder that decodes a chunk if the tiny decoder is not requested. It must have
            been built with its decoder.
        tiny: The tiny decoder, or None if it is not loaded.
        rounding: How pixels are rounded to uint8.
        continuation: How `main` decodes a stream's next chunk: from the stream's cache, or with a
            restart (see the module docstring).
        largest_cells: Number of latent cells per frame in the largest stream. Streams of this size
            are decoded together as long as their total fits into `_JOINED_CELLS`; smaller streams
            are decoded together up to the same total. If not even one stream of the largest size
            fits, the limit is `_JOINED_CELLS`. Warm-up measures the memory for these sizes.
    """

    def __init__(
        self,
        main: StreamingWanVAE | TinyVAEDecoder,
        tiny: TinyVAEDecoder | None = None,
        *,
        rounding: Rounding = "round",
        continuation: Literal["cache", "restart"] = "cache",
        largest_cells: int = _JOINED_CELLS,
    ) -> None:
        self.main = main
        self._joined_cells = min(
            _JOINED_CELLS, largest_cells * max(1, _JOINED_CELLS // largest_cells)
        )
        self.tiny = tiny
        self.rounding = rounding
        self._restarts = continuation == "restart"
        self._num_retained = max(
            RESTART_LATENTS if self._restarts else 0, REACH if tiny is not None else 0
        )

    def can_be_tiny(self, before: DecoderState | None) -> bool:
        """Return whether the tiny decoder can decode the next chunk: either the chunk starts the
        stream, or the tiny decoder decoded the previous chunk, or the latents for a restart are
        available.
        """
        return self.tiny is not None and (
            before is None or before.tiny or before.newest is not None
        )

    def decode(
        self, latents_1CFhw: torch.Tensor, before: DecoderState | None, *, tiny: bool = False
    ) -> tuple[torch.Tensor, DecoderState]:
        """Decode the next latents of a stream.

        Args:
            latents_1CFhw: Clean latents of the chunk.
            before: State after the previous chunk. None if the stream starts with this chunk.
            tiny: Whether to use the tiny decoder. Requires `can_be_tiny`.

        Returns:
            Pixels [1, 3, T, H, W] with T = 4 F (4 F - 3 at the start of a stream), and the new
            state. If ranks decode bands of rows, `main` returns this rank's band, but the tiny
            decoder returns whole frames.
        """
        decoder = self.main
        if tiny:
            assert self.tiny is not None and self.can_be_tiny(before)
            decoder = self.tiny
        cache = newest = None
        if before is not None:
            cache, newest = before.cache if before.tiny == tiny else None, before.newest
        if cache is None and newest is not None:
            again = newest[:, :, -(REACH if tiny else RESTART_LATENTS) :]
            # To limit memory use, the latents are decoded in parts no larger than a chunk.
            for part in again.split(latents_1CFhw.shape[2], dim=2):
                _, cache = decoder.decode(part, cache)
        pixels, cache = decoder.decode(latents_1CFhw, cache)
        if self._restarts and not tiny:
            cache = None
        return pixels, DecoderState(cache, self._newest(newest, latents_1CFhw), tiny)

    def decode_frames(
        self,
        latents_CFhw: torch.Tensor,
        size: tuple[int, int],
        before: DecoderState | None,
        *,
        tiny: bool = False,
    ) -> tuple[torch.Tensor | None, DecoderState]:
        """Decode a stream's next latents as `decode` does, and return uint8 frames [T, H, W, 3] and
        the new state. If ranks decode bands of rows, the frames are None on all ranks except the
        first.
        """
        pixels, state = self.decode(latents_CFhw.unsqueeze(0), before, tiny=tiny)
        frames = to_uint8(pixels, self.rounding)
        if tiny or not isinstance(self.main, StreamingWanVAE) or self.main.bands is None:
            return frames, state
        return self.main.bands.join_frames(frames), state

    def decode_frames_together(
        self, latents_CFhw: Sequence[torch.Tensor], before: Sequence[DecoderState]
    ) -> list[tuple[torch.Tensor, DecoderState]]:
        """Return the results of `decode_together` with the pixels as uint8 frames [T, H, W, 3]."""
        decoded = self.decode_together([latents.unsqueeze(0) for latents in latents_CFhw], before)
        return [(to_uint8(pixels, self.rounding), state) for pixels, state in decoded]

    def most_streams(self, before: DecoderState | None, latents_CFhw: torch.Tensor) -> int:
        """Return the number of chunks of this size that can be decoded together
        (`decode_together`), or 1 if each chunk must be decoded separately.
        """
        if (
            before is None
            or before.cache is None
            or before.tiny
            or not isinstance(self.main, StreamingWanVAE)
        ):
            return 1
        cells = latents_CFhw.shape[2] * latents_CFhw.shape[3]
        return max(1, self._joined_cells // cells) if self.main.takes_streams else 1

    def decode_together(
        self, latents_1CFhw: Sequence[torch.Tensor], before: Sequence[DecoderState]
    ) -> list[tuple[torch.Tensor, DecoderState]]:
        """Decode chunks from up to `most_streams` streams with `main` in one pass. The results are
        equal to those of `decode` within rounding error.
        """
        cache = VAECache.joined([state.cache for state in before if state.cache is not None])
        pixels_B3THW, cache = self.main.decode(torch.cat(list(latents_1CFhw)), cache)
        return [
            (pixels, DecoderState(own, self._newest(state.newest, latents)))
            for pixels, own, state, latents in zip(
                pixels_B3THW.split(1), cache.of_streams(), before, latents_1CFhw, strict=True
            )
        ]

    def _newest(
        self, before_1CFhw: torch.Tensor | None, latents_1CFhw: torch.Tensor
    ) -> torch.Tensor | None:
        if self._num_retained == 0:
            return None
        both = (
            latents_1CFhw
            if before_1CFhw is None
            else torch.cat((before_1CFhw, latents_1CFhw), dim=2)
        )
        return both[:, :, -self._num_retained :].float().clone()

    def state_layout(self, height: int, width: int) -> DecoderLayout:
        """Return the state layout for a stream of `height` x `width` pixels, without running a
        decoder.
        """
        return DecoderLayout(
            self._latents(height, width),
            None if self._restarts else self.main.decoder_cache_layout(height, width),
            None if self.tiny is None else self.tiny.decoder_cache_layout(height, width),
        )

    def state_nbytes(self, height: int, width: int) -> int:
        """Return the maximum state size in bytes for a stream of `height` x `width` pixels, without
        running a decoder.
        """
        caches = [] if self._restarts else [self.main.decoder_cache_nbytes(height, width)]
        caches += [] if self.tiny is None else [self.tiny.decoder_cache_nbytes(height, width)]
        latents = self._num_retained * math.prod(self._latents(height, width))
        return max(caches, default=0) + torch.float32.itemsize * latents

    def _latents(self, height: int, width: int) -> tuple[int, int, int]:
        config = self.main.config
        return config.z_dim, height // config.spatial_factor, width // config.spatial_factor
