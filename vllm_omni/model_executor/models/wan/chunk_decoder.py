# SPDX-License-Identifier: Apache-2.0
"""From one chunk's clean latents to its video frames, by one of two decoders, and the state for the next chunk.

A decoder that has decoded the chunk before goes on from its own features (`VAECache`), so that a stream equals the
whole clip. One that has not (the stream's chunks went to the other decoder, or `continuation` is `restart`, PR 3701's
extension) begins again: it decodes the newest latents before the chunk once more and drops their frames, so that frame
counts are those of a stream that never switched. How near that is to never having stopped:

- the tiny decoder looks `REACH` latents back and gets as many: its frames are those of a stream that is all its own;
- Wan's looks dozens back and gets `RESTART_LATENTS` (a causal convolution looks two back): an approximation, which
  fades as the stream goes on. More would be nearer, and as slow as the other decoder.

Held by tests/model_executor/models/wan/test_chunk_decoder.py and
tests/model_executor/models/lingbot_world/test_lingbot_alternatives.py.
"""

# C channels, F latent frames, h, w latent cells, T video frames, H, W pixels

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vllm_omni.model_executor.models.wan.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.models.wan.taehv import REACH
from vllm_omni.model_executor.models.wan.tiny_vae import TinyVAEDecoder
from vllm_omni.model_executor.models.wan.vae import CacheLayout, Rounding, StreamingWanVAE, VAECache, to_uint8
from vllm_omni.outputs import RequestFailed
from vllm_omni.saved_tensors import SavedTensors

RESTART_LATENTS = 2
_JOINED_CELLS = 4096
"""Latent cells of a frame of all streams that are decoded together: above it arithmetic takes the time, not calls."""


@dataclass(frozen=True, eq=False)
class DecoderState:
    """A stream's decoder state. Immutable; forks share it.

    cache: of the decoder that made the last frames; None = whichever comes begins again. tiny: that was the second one.
    newest: the last latents [1, 16, F, h, w], fp32, as many as a decoder may begin again with; None = never needed.
    """

    cache: VAECache | None
    newest: torch.Tensor | None = None
    tiny: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by stable name, for digests and snapshots; the names say which decoder's they are."""
        cache = {} if self.cache is None else self.cache.tensors()
        named = {f"{_TINY if self.tiny else ''}{name}": tensor for name, tensor in cache.items()}
        return named if self.newest is None else {**named, _NEWEST: self.newest}

    def to(self, device: torch.device | str) -> "DecoderState":
        cache = None if self.cache is None else self.cache.to(device)
        return DecoderState(cache, None if self.newest is None else self.newest.to(device), self.tiny)


_TINY, _NEWEST = "tiny.", "newest"


@dataclass(frozen=True)
class DecoderLayout:
    """Layout of the `DecoderState` of a stream of `height` x `width` pixels on this rank.

    main, tiny: caches of the two decoders; None = that one keeps none, or is not there.
    """

    height: int
    width: int
    main: CacheLayout | None
    tiny: CacheLayout | None

    def restore(self, saved: SavedTensors, device: torch.device | str, num_latents: int) -> DecoderState:
        """Take the state that was saved after `num_latents` latent frames.

        It may come from a server with other decoders beside `main`. Raises `RequestFailed("invalid_snapshot")` naming a
        tensor that is missing or of another shape or dtype.
        """
        newest = None
        shape = saved.shape(_NEWEST)
        if shape is not None:
            kept = shape[2] if len(shape) == 5 else 0
            if not 0 < kept <= min(REACH, num_latents):
                raise RequestFailed("invalid_snapshot", f"the snapshot's tensor decoder.{_NEWEST} is {shape}")
            cells = (self.height // VAE_SPATIAL, self.width // VAE_SPATIAL)
            newest = saved.take(_NEWEST, device, torch.float32, (1, LATENT_CHANNELS, kept, *cells))
        if saved.names(_TINY):
            if self.tiny is not None:
                return DecoderState(self.tiny.restore(saved.under(_TINY), device), newest, True)
            if newest is not None and self.main is not None:
                saved.leave(_TINY)  # nobody here goes on from it
                return DecoderState(None, newest)
        if self.main is not None:
            return DecoderState(self.main.restore(saved, device), newest)
        if newest is None:
            raise RequestFailed("invalid_snapshot", f"the snapshot lacks the tensor decoder.{_NEWEST}")
        return DecoderState(None, newest)


class ChunkDecoder:
    """Decodes one chunk after another. Owns no session; `main` needs its decoder.

    main: decodes all chunks but those that are asked of `tiny`, if that is there. rounding: of pixels to uint8 levels.
    continuation: of `main`, see above.
    largest_cells: latent cells of a frame of the largest stream. No more are decoded together than one of these has, or
    as many of these as fit `_JOINED_CELLS`: warm-up counts the memory of both.
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
        self._joined_cells = min(_JOINED_CELLS, largest_cells * max(1, _JOINED_CELLS // largest_cells))
        self.tiny = tiny
        self._rounding = rounding
        self._restarts = continuation == "restart"
        self._num_kept = max(RESTART_LATENTS if self._restarts else 0, REACH if tiny is not None else 0)

    def can_be_tiny(self, before: DecoderState | None) -> bool:
        """Whether the next chunk behind `before` can go to the tiny decoder: not if that has nothing to begin with."""
        return self.tiny is not None and (before is None or before.tiny or before.newest is not None)

    def decode(
        self, latents_1CFhw: torch.Tensor, before: DecoderState | None, *, tiny: bool = False
    ) -> tuple[torch.Tensor, DecoderState]:
        """Return pixels [1, 3, T, H, W] of the stream's next latents, T = 4 F (4 F - 3 at its start), and new state.

        tiny: by the tiny decoder (`can_be_tiny`). Where several ranks decode bands of rows, `main` returns the band
        and the tiny one whole frames.
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
            for piece in again.split(latents_1CFhw.shape[2], dim=2):  # no larger than chunks are: no more memory
                _, cache = decoder.decode(piece, cache)
        pixels, cache = decoder.decode(latents_1CFhw, cache)
        if self._restarts and not tiny:
            cache = None
        return pixels, DecoderState(cache, self._newest(newest, latents_1CFhw), tiny)

    def decode_frames(
        self, latents_CFhw: torch.Tensor, size: tuple[int, int], before: DecoderState | None, *, tiny: bool = False
    ) -> tuple[torch.Tensor | None, DecoderState]:
        """`decode`, as uint8 frames [T, H, W, 3]; None on the ranks that decode further bands of rows."""
        pixels, state = self.decode(latents_CFhw.unsqueeze(0), before, tiny=tiny)
        frames = to_uint8(pixels, self._rounding)
        if tiny or not isinstance(self.main, StreamingWanVAE) or self.main.bands is None:
            return frames, state
        return self.main.bands.join_frames(frames), state

    def decode_frames_together(
        self, latents_CFhw: Sequence[torch.Tensor], before: Sequence[DecoderState]
    ) -> list[tuple[torch.Tensor, DecoderState]]:
        """`decode_together`, as uint8 frames [T, H, W, 3]."""
        decoded = self.decode_together([latents.unsqueeze(0) for latents in latents_CFhw], before)
        return [(to_uint8(pixels, self._rounding), state) for pixels, state in decoded]

    def most_streams(self, before: DecoderState | None, latents_CFhw: torch.Tensor) -> int:
        """How many chunks like this one behind `before` are decoded together at most (`decode_together`); 1 = alone."""
        if before is None or before.cache is None or before.tiny or not isinstance(self.main, StreamingWanVAE):
            return 1
        cells = latents_CFhw.shape[2] * latents_CFhw.shape[3]
        return max(1, self._joined_cells // cells) if self.main.takes_streams else 1

    def decode_together(
        self, latents_1CFhw: Sequence[torch.Tensor], before: Sequence[DecoderState]
    ) -> list[tuple[torch.Tensor, DecoderState]]:
        """`decode` by `main` for each of several streams (`most_streams`), equal within float tolerance."""
        cache = VAECache.joined([state.cache for state in before if state.cache is not None])
        pixels_B3THW, cache = self.main.decode(torch.cat(list(latents_1CFhw)), cache)
        return [
            (pixels, DecoderState(own, self._newest(state.newest, latents)))
            for pixels, own, state, latents in zip(
                pixels_B3THW.split(1), cache.of_streams(), before, latents_1CFhw, strict=True
            )
        ]

    def _newest(self, before_1CFhw: torch.Tensor | None, latents_1CFhw: torch.Tensor) -> torch.Tensor | None:
        if self._num_kept == 0:
            return None
        both = latents_1CFhw if before_1CFhw is None else torch.cat((before_1CFhw, latents_1CFhw), dim=2)
        return both[:, :, -self._num_kept :].float().clone()

    def state_layout(self, height: int, width: int) -> DecoderLayout:
        """Layout of the state of a stream of `height` x `width` pixels; runs nothing."""
        return DecoderLayout(
            height,
            width,
            None if self._restarts else self.main.decoder_cache_layout(height, width),
            None if self.tiny is None else self.tiny.decoder_cache_layout(height, width),
        )

    def state_nbytes(self, height: int, width: int) -> int:
        """Most bytes of the state of a stream of `height` x `width` pixels; runs nothing."""
        caches = [] if self._restarts else [self.main.decoder_cache_nbytes(height, width)]
        caches += [] if self.tiny is None else [self.tiny.decoder_cache_nbytes(height, width)]
        cells = (height // VAE_SPATIAL) * (width // VAE_SPATIAL)
        return max(caches, default=0) + 4 * LATENT_CHANNELS * self._num_kept * cells
