# SPDX-License-Identifier: Apache-2.0
"""Compute the conditioning of a session's chunks on its start image.

A chunk's conditioning is `y`, Wan's additional input channels: a mask, and the latents of the clip
`[image, grey, grey, ...]`.

The original encodes the image and all grey frames as one clip. This module runs the causal encoder
chunk by chunk instead. The results are bit-identical to those of the original, and the clip length
need not be known in advance. When two consecutive latent frames differ by no more than `_SETTLED`,
the conditioning has settled: the later frame is used for all following frames, and the encoder does
not run again. `LaterCondition` lists this method (`streamed`) and those of other implementations.
With `streamed`, sessions share the latents of equal start images (`ClipCache`). The encoder does
not run for an image whose conditioning has settled in an earlier session.

`GreyCondition` computes the conditioning. It runs on the first pipeline stage, which embeds
patches. Each session on that stage has a `ConditionState` (`ImageStartedPipeline`,
`ImageStartedSession`).
"""

# C channels, F latent frames, h, w latent cells, T video frames, H, W pixels

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgspec
import torch

from vllm_omni.actions import ActionSpace, image_tensor
from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import PendingScalar
from vllm_omni.model_executor.interfaces import Inputs
from vllm_omni.model_executor.models.wan.architecture import LaterCondition
from vllm_omni.model_executor.models.wan.images.clip_cache import (
    MAX_FRAMES,
    ClipCache,
    ClipKey,
    clip_key,
)
from vllm_omni.model_executor.models.wan.vae.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.models.wan.vae.vae import CacheLayout, StreamingWanVAE, VAECache
from vllm_omni.model_executor.streaming.session import SessionScalars, StreamingSession, Window
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors

MASK_CHANNELS = 4
"""Number of mask channels: one for each video frame in a latent frame."""
_SETTLED = {torch.float32: 2**-8, torch.bfloat16: 2**-6}
"""Largest change between consecutive latent frames that counts as no change, relative to the latent
frame's standard deviation. The keys are VAE dtypes. The released model converts its conditioning to
bfloat16, which rounds by 2**-8. The limit for a bfloat16 VAE is higher, because such a VAE rounds
in every layer. Each change is about half of the previous one, so all later changes add up to about
the last change.
"""


@dataclass(frozen=True)
class ConditionLayout:
    """Layout of a session's `ConditionState`."""

    height: int
    """Height of the video in pixels."""
    width: int
    """Width of the video in pixels."""
    later: LaterCondition
    """Conditioning of the chunks after the one with the start image."""
    chunk_frames: int
    """Number of latent frames in every chunk except the first of a session."""
    encoder: CacheLayout
    """Layout of the encoder cache."""

    def restore(
        self, saved: SavedTensors, device: torch.device | str, *, settled: bool, num_encoded: int
    ) -> "ConditionState":
        """Restore a state from a snapshot.

        Raises:
            RequestFailed: A tensor is missing or has a different shape or dtype
                (`invalid_snapshot`). The message names the tensor.
        """
        shape = saved.shape("last") or []
        streams = self.later == "streamed"
        allowed = range(1, MAX_FRAMES + 1) if streams else (self.chunk_frames,)
        frames = shape[2] if settled and len(shape) > 2 and shape[2] in allowed else 1
        cells = (self.height // VAE_SPATIAL, self.width // VAE_SPATIAL)
        last_1CFhw = saved.take_tensor(
            "last", device, torch.float32, (1, LATENT_CHANNELS, frames, *cells)
        )
        cache = None
        if not settled and self.later != "fresh_grey":
            cache = self.encoder.restore(saved, device)
        return ConditionState(self.height, self.width, cache, last_1CFhw, settled, num_encoded)


@dataclass(frozen=True)
class ConditionSettling:
    """Result of a settling check. The copy from the device to the host may still be in progress."""

    encoded: int
    """Number of latent frames that were encoded."""
    unsettled: PendingScalar
    """Number of encoded latent frames that differ from their predecessors. The copy of this number
    from the device may still be in progress.
    """


@dataclass(frozen=True, eq=False)
class ConditionState:
    """Immutable conditioning state of a session, shared by the session's forks.

    While the settling check is pending (`settling` is set), the other fields describe a state that
    has not settled.
    """

    height: int
    """Height of the video in pixels."""
    width: int
    """Width of the video in pixels."""
    cache: VAECache | None
    """Encoder cache. None if the encoder will not run again or will restart."""
    last_1CFhw: torch.Tensor
    """Latest latent frame, fp32. In a settled state, this is the conditioning for all later chunks:
    the following latent frames, of which the last one is repeated (`streamed`), or the frames of a
    whole chunk.
    """
    settled: bool = False
    """Whether `last_1CFhw` contains the conditioning of all later chunks."""
    num_encoded: int = 1
    """Number of latent frames since the start image, including the start image, that the encoder
    has produced for this session or for an earlier session with the same start image. Frames in
    `last_1CFhw` for later chunks do not count.
    """
    settling: ConditionSettling | None = None
    """Result of the settling check. None if the state is resolved."""
    key: ClipKey | None = None
    """Key under which the encoded latent frames are added to the clip cache. None: they are not
    added.
    """

    def resolved(self) -> "ConditionState":
        """Apply the result of the settling check and return the resulting state. If the result has
        not arrived yet, the host waits for the device.
        """
        if self.settling is None:
            return self
        unsettled = self.settling.unsettled.wait()
        settled = unsettled < self.settling.encoded
        return replace(
            self,
            cache=None if settled else self.cache,
            settled=settled,
            num_encoded=self.num_encoded + unsettled,
            settling=None,
        )

    @property
    def nbytes(self) -> int:
        return self.last_1CFhw.nbytes + (self.cache.nbytes if self.cache is not None else 0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a resolved state, keyed by their names in digests and snapshots."""
        cached = self.cache.tensors() if self.cache is not None else {}
        return {"last": self.last_1CFhw, **cached}

    def to(self, device: torch.device | str) -> "ConditionState":
        """Move a resolved state to `device`. Tensors that are already on that device are not
        copied.
        """
        cache = self.cache.to(device) if self.cache is not None else None
        return replace(self, cache=cache, last_1CFhw=self.last_1CFhw.to(device))


class GreyCondition:
    """Computes the conditioning of chunks. This class does not store session state.

    Args:
        vae: The VAE with its encoder.
        later: Conditioning of the chunks after the one with the start image.
        chunk_frames: Number of latent frames in every chunk except the first of a session.
    """

    def __init__(
        self,
        vae: StreamingWanVAE,
        later: LaterCondition = "streamed",
        *,
        chunk_frames: int = 3,
    ) -> None:
        if not vae.has_encoder:
            raise ValueError(
                "conditioning requires the VAE's encoder; build the VAE with encoder=True"
            )
        self.vae = vae
        self.later = later
        self.chunk_frames = chunk_frames
        self.clips = ClipCache()

    def key_of(self, image: torch.Tensor, height: int, width: int) -> ClipKey | None:
        """Return a start image's key in the clip cache (`clip_key`). None: the conditioning of
        later chunks does not use the cache.
        """
        return clip_key(image, height, width) if self.later == "streamed" else None

    def next(
        self,
        image_1CTHW: torch.Tensor | None,
        num_latents: int,
        state: ConditionState | None,
        key: ClipKey | None = None,
    ) -> tuple[torch.Tensor, ConditionState]:
        """Return the conditioning y for the next latent frames, fp32 [20, F, h, w], and the next
        state.

        Args:
            image_1CTHW: New start image, [1, 3, 1, H, W] in [-1, 1] (`prepare_image`). None:
                continue from `state`.
            num_latents: Number F of latent frames.
            state: State after the previous chunk. None before the first chunk.
            key: The new start image's key (`key_of`). None: do not use the clip cache.

        Raises:
            ValueError: Both the image and the state are None, or `num_latents` is less than 1.
        """
        if num_latents < 1:
            raise ValueError(f"num_latents must be at least 1, got {num_latents}")
        starts = image_1CTHW is not None
        if image_1CTHW is not None:
            latents, state = self._start(image_1CTHW, num_latents, key)
        elif state is None:
            raise ValueError("a condition starts with an image, got neither image nor state")
        elif self.later == "streamed":
            latents, state = self._stream(self._with_complete_clip(state.resolved()), num_latents)
        else:
            latents, state = self._repeat(state.resolved(), num_latents)
        cond_CFhw = torch.cat(latents, dim=2)[0]
        mask_CFhw = cond_CFhw.new_zeros(MASK_CHANNELS, *cond_CFhw.shape[1:])
        mask_CFhw[:, : int(starts)] = 1
        return torch.cat([mask_CFhw, cond_CFhw]), state

    def state_layout(self, height: int, width: int) -> ConditionLayout:
        """Return a state's layout for frames of this size, without running the encoder."""
        encoder = self.vae.encoder_cache_layout(height, width)
        return ConditionLayout(height, width, self.later, self.chunk_frames, encoder)

    def state_nbytes(self, height: int, width: int) -> int:
        """Return a state's maximum size in bytes for frames of this size, without running the
        encoder.
        """
        cells = (height // self.vae.config.spatial_factor) * (
            width // self.vae.config.spatial_factor
        )
        frame = 4 * self.vae.config.z_dim * cells
        if self.later == "fresh_grey":
            return self.chunk_frames * frame
        streaming = self.vae.encoder_cache_nbytes(height, width) + frame
        return (
            max(streaming, self.chunk_frames * frame) if self.later == "second_chunk" else streaming
        )

    def _start(
        self, image_1CTHW: torch.Tensor, num_latents: int, key: ClipKey | None
    ) -> tuple[list[torch.Tensor], ConditionState]:
        height, width = image_1CTHW.shape[3:]
        clip_1CFhw = None if key is None else self.clips.find(key)
        if clip_1CFhw is not None:
            known = ConditionState(height, width, None, clip_1CFhw, settled=True, num_encoded=0)
            return self._stream(known, num_latents)
        latent, cache = self.vae.encode(image_1CTHW, None)
        if key is not None:
            self.clips.add(key, 0, [latent])
        state = ConditionState(height, width, cache, latent, key=key)
        later, state = self._stream(state, num_latents - 1)
        if self.later == "fresh_grey":
            state = replace(state.resolved(), cache=None, settled=False)
        return [latent, *later], state

    def _stream(
        self, state: ConditionState, num_latents: int
    ) -> tuple[list[torch.Tensor], ConditionState]:
        """Encode the next `num_latents` grey latent frames if they still change.

        On CUDA, the host does not wait to find out whether the frames still change. The encoder
        runs for all frames, and once the state has settled, the device discards the later results.
        """
        if state.cache is None or num_latents == 0:
            return self._known(state, num_latents)
        last, cache, latents = state.last_1CFhw, state.cache, []
        changes = torch.ones((), dtype=torch.bool, device=last.device)
        unsettled = torch.zeros((), dtype=torch.int32, device=last.device)
        for _ in range(num_latents):
            latent, cache = self.vae.encode(self._grey_frames(state, 1), cache)
            # After a change this small, all later latent frames are practically equal to this one.
            settled = (latent - last).abs().max() <= _SETTLED[self.vae.dtype] * latent.std()
            last, changes = torch.where(changes, latent, last), changes & ~settled
            unsettled = unsettled + changes
            latents.append(last)
            if self._is_readable(changes) and not changes:
                break
        if state.key is not None:
            self.clips.add(state.key, state.num_encoded, latents)
        settling = ConditionSettling(len(latents), PendingScalar(unsettled))
        latents += [last] * (num_latents - len(latents))
        return latents, replace(state, cache=cache, last_1CFhw=last, settling=settling)

    @staticmethod
    def _known(
        state: ConditionState, num_latents: int
    ) -> tuple[list[torch.Tensor], ConditionState]:
        """Return the next latent frames of a state that needs no encoder."""
        ahead_1CFhw = state.last_1CFhw
        used = min(num_latents, ahead_1CFhw.shape[2] - 1)
        if used == 0:
            return [ahead_1CFhw] * num_latents, state
        latents = list(ahead_1CFhw[:, :, :num_latents].split(1, dim=2))
        latents += latents[-1:] * (num_latents - len(latents))
        rest_1CFhw = ahead_1CFhw[:, :, used:].contiguous()
        return latents, replace(state, last_1CFhw=rest_1CFhw, num_encoded=state.num_encoded + used)

    def _with_complete_clip(self, state: ConditionState) -> ConditionState:
        """Complete the clip of a session whose conditioning has settled."""
        if state.key is None or not state.settled:
            return state
        self.clips.complete(state.key, state.num_encoded + 1)
        return replace(state, key=None)

    def _repeat(
        self, state: ConditionState, num_latents: int
    ) -> tuple[list[torch.Tensor], ConditionState]:
        """Return the conditioning that all later chunks share. It is encoded only on the first
        call.
        """
        if not state.settled:
            afresh = self.later == "fresh_grey"
            retained, _ = self.vae.encode(
                self._grey_frames(state, num_latents, first=afresh), state.cache
            )
            state = replace(
                state,
                cache=None,
                last_1CFhw=retained[:, :, -num_latents:].contiguous(),
                settled=True,
            )
        # If the state settled in the chunk with the image, it also contains only one latent frame.
        if state.last_1CFhw.shape[2] == 1:
            return [state.last_1CFhw] * num_latents, state
        assert state.last_1CFhw.shape[2] == num_latents, "chunks after the first are of one size"
        return [state.last_1CFhw], state

    @staticmethod
    def _is_readable(flag: torch.Tensor) -> bool:
        """Return whether the host can read `flag` without synchronising with a device."""
        return not flag.is_cuda

    def _grey_frames(
        self, state: ConditionState, num_latents: int, *, first: bool = False
    ) -> torch.Tensor:
        """Return the grey video frames for `num_latents` latent frames. If `first` is set, the
        frames start a clip, so one frame is added.
        """
        frames = int(first) + num_latents * self.vae.config.temporal_factor
        return torch.zeros(1, 3, frames, state.height, state.width, device=state.last_1CFhw.device)


# -- sessions that start with an image -------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageStartedPipeline:
    """Base class of the immutable `StreamingSession.own` values of sessions that start with an
    image.
    """

    condition: ConditionState | None
    """Conditioning state. None on ranks that do not embed patches."""

    def tensors(self) -> dict[str, torch.Tensor]:
        retained: Mapping[str, torch.Tensor] = (
            {} if self.condition is None else self.condition.resolved().tensors()
        )
        return {f"condition.{name}": tensor for name, tensor in retained.items()}

    def to(self, device: torch.device | str) -> Self:
        return (
            self
            if self.condition is None
            else replace(self, condition=self.condition.resolved().to(device))
        )


class ImageStartedScalars(SessionScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scalars in a session's snapshot, in the format that `ImageStartedSession.scalars` returns."""

    condition_settled: bool | None
    """Value of `ConditionState.settled`. None if this rank has no conditioning."""
    condition_encoded: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Value of `ConditionState.num_encoded`."""


World = TypeVar("World", bound=ImageStartedPipeline)


class ImageStartedSession(StreamingSession[Window, World], Generic[Window, World]):
    """A session that starts with an image. Its `own` attribute is an instance of the model family's
    subclass of `ImageStartedPipeline`.
    """

    scalars_type: ClassVar[type[ImageStartedScalars]] = ImageStartedScalars

    @property
    def condition(self) -> ConditionState | None:
        return None if self.own is None else self.own.condition

    def value_scalars(self) -> dict[str, Any]:
        condition = None if self.condition is None else self.condition.resolved()
        return {
            "condition_settled": None if condition is None else condition.settled,
            "condition_encoded": 1 if condition is None else condition.num_encoded,
        }

    def restore_condition(
        self,
        layout: ConditionLayout | None,
        retained: ImageStartedScalars,
        saved: SavedTensors,
        device: torch.device,
    ) -> ConditionState | None:
        """Restore the conditioning from a snapshot.

        Args:
            layout: The state's layout. None if this rank has no conditioning.
            retained: Scalars from the snapshot.
            saved: Tensors from the snapshot.
            device: Device for the restored tensors.

        Raises:
            RequestFailed: The snapshot is invalid (`invalid_snapshot`).
        """
        settled = retained.condition_settled
        if (layout is None) != (
            settled is None
        ) or retained.condition_encoded > retained.committed_frames + retained.omitted_frames:
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's frames and condition do not fit together"
            )
        if layout is None or settled is None:
            return None
        part = saved.under("condition.")
        return layout.restore(part, device, settled=settled, num_encoded=retained.condition_encoded)


def image_warmup(omni: OmniConfig, space: ActionSpace) -> list[Inputs]:
    """Return the warm-up inputs for a first and a second chunk at the largest video size. The
    second chunk is included because it decodes more frames than the first.
    """
    image = torch.zeros(omni.height, omni.width, 3, dtype=torch.uint8)
    images = dict.fromkeys(("image", *map(image_tensor, space.image_names)), image)
    prompt = None if space.prompt == "none" else "warm-up"
    first = DiffusionParams(session_id="warm-up", prompt=prompt, actions=[])
    return [(first, images), (msgspec.structs.replace(first, prompt=None), {})]
