# SPDX-License-Identifier: Apache-2.0
"""The condition `y` of each chunk: which latent frame is given, and the latents of `[image, grey,
grey, ...]`.

The original encodes image and grey frames as one clip; here the causal encoder is streamed chunk by
chunk, which gives the same bits without knowing the length in advance. After the image the encoder
settles: once a latent frame differs from the one before it by no more than `_SETTLED`, it stands
for all later ones and the encoder is not run again. Other implementations stop encoding earlier, or
begin afresh: `components.LaterCondition`.

`GreyCondition` is the part of a model that makes it, on the first pipeline stage, which embeds
patches. Each session of that stage holds the state of its condition (`ImageStartedPipeline`,
`ImageStartedSession`); a family adds its own state.
Held by tests/model_executor/models/wan/test_image_condition.py and
tests/model_executor/models/lingbot_world/test_lingbot_alternatives.py.
"""

# C channels, F latent frames, h, w latent cells, T video frames, H, W pixels

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgspec
import torch

from vllm_omni.actions import ActionSpace
from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import Arriving
from vllm_omni.model_executor.interfaces import Inputs
from vllm_omni.model_executor.models.wan.architecture import LaterCondition
from vllm_omni.model_executor.models.wan.vae.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.models.wan.vae.vae import CacheLayout, StreamingWanVAE, VAECache
from vllm_omni.model_executor.streaming.session import SessionScalars, StreamingSession, Window
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors

MASK_CHANNELS = 4
"""Pixels per token along each side: 8 of the VAE times a patch of 2."""
_SETTLED = {torch.float32: 2**-8, torch.bfloat16: 2**-6}
"""By the VAE's type, the largest change from one latent frame to the next, over their deviation,
that no longer counts: bfloat16, in which the released model takes its condition in, rounds by
2**-8; a VAE in bfloat16 rounds in every layer. Changes halve about once a latent frame, so all
later changes together are of the same size."""


@dataclass(frozen=True)
class ConditionLayout:
    """Layout of the `ConditionState` of a session of `height` x `width` pixels. encoder: its
    cache's layout.
    """

    height: int
    width: int
    later: LaterCondition
    chunk_frames: int
    encoder: CacheLayout

    def restore(
        self, saved: SavedTensors, device: torch.device | str, *, settled: bool, num_encoded: int
    ) -> "ConditionState":
        """Take the state out of a snapshot.

        Raises `RequestFailed("invalid_snapshot")` naming a tensor that is missing or of another
        shape or dtype.
        """
        shape = saved.shape("last") or []
        repeats = settled and self.later != "streamed"
        frames = self.chunk_frames if repeats and shape[2:3] == [self.chunk_frames] else 1
        cells = (self.height // VAE_SPATIAL, self.width // VAE_SPATIAL)
        last_1CFhw = saved.take_tensor(
            "last", device, torch.float32, (1, LATENT_CHANNELS, frames, *cells)
        )
        cache = None
        if not settled and self.later != "fresh_grey":
            cache = self.encoder.restore(saved, device)
        return ConditionState(self.height, self.width, cache, last_1CFhw, settled, num_encoded)


@dataclass(frozen=True)
class Settling:
    """Whether a state has settled, which only the device knows yet.

    encoded: latent frames that went through the encoder. unsettled: how many of them came before it
    settled.
    """

    encoded: int
    unsettled: Arriving


@dataclass(frozen=True, eq=False)
class ConditionState:
    """Where a session's condition stream stands. Immutable; shared by forks.

    cache: the encoder's cache; None once settled, and when nothing will be encoded behind the
    image.
    last_1CFhw: the newest latent frame, to compare the next one with, fp32; of a settled state the
    condition of all later chunks: one latent frame, or a whole chunk. num_encoded: latent frames
    since the image that were encoded.
    settling: until it is `resolved`, the other fields are those of a state that has not settled.
    """

    height: int
    width: int
    cache: VAECache | None
    last_1CFhw: torch.Tensor
    settled: bool = False
    num_encoded: int = 1
    settling: Settling | None = None

    def resolved(self) -> "ConditionState":
        """The same with the device's answer, for which the host waits; itself if nothing is
        open.
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
        """Return the tensors of a resolved state by stable name, for digests and snapshots."""
        cached = self.cache.tensors() if self.cache is not None else {}
        return {"last": self.last_1CFhw, **cached}

    def to(self, device: torch.device | str) -> "ConditionState":
        """Return a resolved state on `device`; the same tensors if they are there already."""
        cache = self.cache.to(device) if self.cache is not None else None
        return replace(self, cache=cache, last_1CFhw=self.last_1CFhw.to(device))


class GreyCondition:
    """Makes the condition of one chunk after another. Owns no session; `vae` needs its encoder.

    chunk_frames: latent frames of every chunk but a session's first.
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
                "the condition is made by the VAE's encoder; build the VAE with encoder=True"
            )
        self.vae = vae
        self.later = later
        self.chunk_frames = chunk_frames

    def next(
        self, image_1CTHW: torch.Tensor | None, num_latents: int, state: ConditionState | None
    ) -> tuple[torch.Tensor, ConditionState]:
        """Return y [20, F, h, w] fp32 for the next `num_latents` latent frames, and the state after
        them.

        image_1CTHW: [1, 3, 1, H, W] in [-1, 1] (`prepare_image`) starts a condition, at a session's
        start or when its image is switched; None goes on from `state`. Raises ValueError when
        neither is given.
        """
        if num_latents < 1:
            raise ValueError(f"num_latents must be at least 1, got {num_latents}")
        starts = image_1CTHW is not None
        if image_1CTHW is not None:
            latents, state = self._start(image_1CTHW, num_latents)
        elif state is None:
            raise ValueError("a condition starts with an image, got neither image nor state")
        elif self.later == "streamed":
            latents, state = self._stream(state.resolved(), num_latents)
        else:
            latents, state = self._repeat(state.resolved(), num_latents)
        cond_CFhw = torch.cat(latents, dim=2)[0]
        mask_CFhw = cond_CFhw.new_zeros(MASK_CHANNELS, *cond_CFhw.shape[1:])
        mask_CFhw[:, : int(starts)] = 1
        return torch.cat([mask_CFhw, cond_CFhw]), state

    def state_layout(self, height: int, width: int) -> ConditionLayout:
        """Layout of a state of this size; runs nothing."""
        encoder = self.vae.encoder_cache_layout(height, width)
        return ConditionLayout(height, width, self.later, self.chunk_frames, encoder)

    def state_nbytes(self, height: int, width: int) -> int:
        """Most bytes a state of this size holds; runs nothing."""
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
        self, image_1CTHW: torch.Tensor, num_latents: int
    ) -> tuple[list[torch.Tensor], ConditionState]:
        height, width = image_1CTHW.shape[3:]
        latent, cache = self.vae.encode(image_1CTHW, None)
        later, state = self._stream(ConditionState(height, width, cache, latent), num_latents - 1)
        if self.later == "fresh_grey":
            state = replace(state.resolved(), cache=None, settled=False)
        return [latent, *later], state

    def _stream(
        self, state: ConditionState, num_latents: int
    ) -> tuple[list[torch.Tensor], ConditionState]:
        """Encode so many more latent frames of grey, as far as they still change.

        The host does not wait to hear whether they do: on CUDA the encoder goes on, and the device
        drops the result.
        """
        if state.cache is None or num_latents == 0:
            return [state.last_1CFhw] * num_latents, state
        last, cache, latents = state.last_1CFhw, state.cache, []
        changes = torch.ones((), dtype=torch.bool, device=last.device)
        unsettled = torch.zeros((), dtype=torch.int32, device=last.device)
        for _ in range(num_latents):
            latent, cache = self.vae.encode(self._grey_frames(state, 1), cache)
            # later latent frames are as good as equal to this one
            settled = (latent - last).abs().max() <= _SETTLED[self.vae.dtype] * latent.std()
            last, changes = torch.where(changes, latent, last), changes & ~settled
            unsettled = unsettled + changes
            latents.append(last)
            if self._is_heard(changes) and not changes:
                break
        settling = Settling(len(latents), Arriving(unsettled))
        latents += [last] * (num_latents - len(latents))
        return latents, replace(state, cache=cache, last_1CFhw=last, settling=settling)

    def _repeat(
        self, state: ConditionState, num_latents: int
    ) -> tuple[list[torch.Tensor], ConditionState]:
        """Return the chunk that all later ones equal, encoded when it is first asked for."""
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
        if state.last_1CFhw.shape[2] == 1:  # also if the stream had settled in the image's chunk
            return [state.last_1CFhw] * num_latents, state
        assert state.last_1CFhw.shape[2] == num_latents, "chunks after the first are of one size"
        return [state.last_1CFhw], state

    @staticmethod
    def _is_heard(flag: torch.Tensor) -> bool:
        """Whether the host can read it without waiting."""
        return not flag.is_cuda

    def _grey_frames(
        self, state: ConditionState, num_latents: int, *, first: bool = False
    ) -> torch.Tensor:
        """Return grey video frames that encode to so many latent frames; with one more in front
        if they are a clip.
        """
        frames = int(first) + num_latents * self.vae.config.temporal_factor
        return torch.zeros(1, 3, frames, state.height, state.width, device=state.last_1CFhw.device)


# -- sessions that start with an image -------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageStartedPipeline:
    """Where a session's condition stands.

    Immutable. condition: None on ranks that embed no patches.
    """

    condition: ConditionState | None

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
    """The result of `ImageStartedSession.scalars`, as read from a file."""

    condition_settled: bool | None
    condition_encoded: Annotated[int, msgspec.Meta(ge=1)] = 1


World = TypeVar("World", bound=ImageStartedPipeline)


class ImageStartedSession(StreamingSession[Window, World], Generic[Window, World]):
    """A session that starts with an image; its `own` is the family's `ImageStartedPipeline`."""

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
        """Take the condition out of a snapshot. layout: None = this rank has none.

        Raises `RequestFailed`.
        """
        settled = retained.condition_settled
        if (layout is None) != (
            settled is None
        ) or retained.condition_encoded > retained.committed_frames:
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's frames and condition do not fit together"
            )
        if layout is None or settled is None:
            return None
        part = saved.under("condition.")
        return layout.restore(part, device, settled=settled, num_encoded=retained.condition_encoded)


def image_warmup(omni: OmniConfig, space: ActionSpace) -> list[Inputs]:
    """Return a first and a later chunk of the largest size: a later one decodes more frames."""
    image = torch.zeros(omni.height, omni.width, 3, dtype=torch.uint8)
    prompt = None if space.prompt == "none" else "warm-up"
    first = DiffusionParams(session_id="warm-up", prompt=prompt, actions=[])
    return [(first, {"image": image}), (msgspec.structs.replace(first, prompt=None), {})]
