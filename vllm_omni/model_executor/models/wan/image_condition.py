# SPDX-License-Identifier: Apache-2.0
"""The condition `y` of each chunk: a mask of given latent frames, and the latents of `[image, grey,
grey, ...]`.

The original encodes the image and grey frames as one clip. Here the causal encoder runs chunk by
chunk, which is bitwise equal and needs no length in advance. After the image, the encoding
converges: once a latent frame differs from the previous one by at most `_SETTLED`, it is used for
all later frames and the encoder no longer runs. Other implementations stop earlier or restart; see
`components.LaterCondition`.

`GreyCondition` computes the condition on the first pipeline stage, which embeds patches. Each
session of that stage holds the state (`ImageWorld`, `ImageWorldSession`); a family adds its own
state.
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
from vllm_omni.model_executor.models.wan.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.models.wan.vae import CacheLayout, StreamingWanVAE, VAECache
from vllm_omni.model_executor.streaming.session import SessionScalars, StreamingSession, Window
from vllm_omni.outputs import RequestFailed
from vllm_omni.saved_tensors import SavedTensors

MASK_CHANNELS = 4
"""Pixels per token along each side: 8 of the VAE times a patch of 2."""
_SETTLED = {torch.float32: 2**-8, torch.bfloat16: 2**-6}
"""Convergence threshold by the VAE's dtype: the largest change between consecutive latent frames,
divided by their standard deviation, that counts as none. The released model reads its condition in
bfloat16, which rounds by 2**-8; a bfloat16 VAE rounds in every layer. Changes halve about once per
latent frame, so the sum of all later changes is of the same size."""


@dataclass(frozen=True)
class ConditionLayout:
    """Shapes of the `ConditionState` of a session."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    later: LaterCondition
    """How later chunks are conditioned."""
    chunk_frames: int
    """Latent frames of every chunk except the first."""
    encoder: CacheLayout
    """Layout of the encoder's cache."""

    def restore(
        self, saved: SavedTensors, device: torch.device | str, *, settled: bool, num_encoded: int
    ) -> "ConditionState":
        """Restore the state from a snapshot.

        Args:
            saved: Tensors of the snapshot.
            device: Device of the state.
            settled: Whether the saved state has converged.
            num_encoded: Latent frames that were encoded after the image.

        Raises:
            RequestFailed: `invalid_snapshot` with the name of a tensor that is missing or has
                another shape or dtype.
        """
        shape = saved.shape("last") or []
        repeats = settled and self.later in ("second_chunk", "fresh_grey")
        frames = self.chunk_frames if repeats and shape[2:3] == [self.chunk_frames] else 1
        cells = (self.height // VAE_SPATIAL, self.width // VAE_SPATIAL)
        last_1CFhw = saved.take("last", device, torch.float32, (1, LATENT_CHANNELS, frames, *cells))
        cache = None
        if not settled and self.later != "fresh_grey":
            cache = self.encoder.restore(saved, device)
        return ConditionState(self.height, self.width, cache, last_1CFhw, settled, num_encoded)


@dataclass(frozen=True)
class Settling:
    """Whether a state has converged, while the result is still only on the device."""

    encoded: int
    """Latent frames that were encoded."""
    unsettled: Arriving
    """Number of them that were encoded before convergence, in transfer to the host."""
    ends: bool
    """Whether encoding ends here even without convergence."""


@dataclass(frozen=True, eq=False)
class ConditionState:
    """State of a session's condition. Immutable; shared by forks."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    cache: VAECache | None
    """The encoder's cache. None after convergence, and if nothing is encoded after the image."""
    last_1CFhw: torch.Tensor
    """The newest latent frame, fp32, to compare the next one with. After convergence: the
    condition of all later chunks, one latent frame or a whole chunk."""
    settled: bool = False
    """Whether encoding has converged."""
    num_encoded: int = 1
    """Latent frames since the image that were encoded."""
    settling: Settling | None = None
    """Result that is still on the device. Until `resolved`, the other fields are those before
    convergence."""

    def resolved(self) -> "ConditionState":
        """Return the state with the result from the device, after waiting for it; the same object
        if nothing is pending."""
        if self.settling is None:
            return self
        unsettled = self.settling.unsettled.wait()
        settled = self.settling.ends or unsettled < self.settling.encoded
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
        """Move a resolved state to `device`; tensors that are already there are shared."""
        cache = self.cache.to(device) if self.cache is not None else None
        return replace(self, cache=cache, last_1CFhw=self.last_1CFhw.to(device))


class GreyCondition:
    """Computes the condition of chunks of any session, without holding session state.

    Args:
        vae: The VAE, with its encoder.
        later: How chunks after the first are conditioned.
        chunk_frames: Latent frames of every chunk except a session's first.
        encoded_frames: Video frames, including the image, after which `last_frame` stops encoding;
            4 n + 1.
    """

    def __init__(
        self,
        vae: StreamingWanVAE,
        later: LaterCondition = "streamed",
        *,
        chunk_frames: int = 3,
        encoded_frames: int = 61,
    ) -> None:
        if not vae.has_encoder:
            raise ValueError("the condition is made by the VAE's encoder; build the VAE with encoder=True")
        self.vae = vae
        self.later = later
        self.chunk_frames = chunk_frames
        self.most_encoded = (encoded_frames - 1) // vae.config.temporal_factor + 1

    def next(
        self, image_1CTHW: torch.Tensor | None, num_latents: int, state: ConditionState | None
    ) -> tuple[torch.Tensor, ConditionState]:
        """Return y [20, F, h, w] fp32 for the next `num_latents` latent frames, and the next state.

        Args:
            image_1CTHW: [1, 3, 1, H, W] in [-1, 1] (`prepare_image`), at the start of a session or
                for a new image. None: continue from `state`.
            num_latents: F.
            state: State after the previous chunk.

        Raises:
            ValueError: There is neither image nor state.
        """
        if num_latents < 1:
            raise ValueError(f"num_latents must be at least 1, got {num_latents}")
        starts = image_1CTHW is not None
        if image_1CTHW is not None:
            latents, state = self._start(image_1CTHW, num_latents)
        elif state is None:
            raise ValueError("a condition starts with an image, got neither image nor state")
        elif self.later in ("second_chunk", "fresh_grey"):
            latents, state = self._repeat(state.resolved(), num_latents)
        else:
            latents, state = self._stream(state.resolved(), num_latents)
        cond_CFhw = torch.cat(latents, dim=2)[0]
        mask_CFhw = cond_CFhw.new_zeros(MASK_CHANNELS, *cond_CFhw.shape[1:])
        mask_CFhw[:, : int(starts)] = 1
        return torch.cat([mask_CFhw, cond_CFhw]), state

    def state_layout(self, height: int, width: int) -> ConditionLayout:
        """Return the layout of a state of this size, without running anything."""
        encoder = self.vae.encoder_cache_layout(height, width)
        return ConditionLayout(height, width, self.later, self.chunk_frames, encoder)

    def state_nbytes(self, height: int, width: int) -> int:
        """Return the maximum bytes of a state of this size, without running anything."""
        cells = (height // self.vae.config.spatial_factor) * (width // self.vae.config.spatial_factor)
        frame = 4 * self.vae.config.z_dim * cells
        if self.later == "fresh_grey":
            return self.chunk_frames * frame
        streaming = self.vae.encoder_cache_nbytes(height, width) + frame
        return max(streaming, self.chunk_frames * frame) if self.later == "second_chunk" else streaming

    def _start(self, image_1CTHW: torch.Tensor, num_latents: int) -> tuple[list[torch.Tensor], ConditionState]:
        height, width = image_1CTHW.shape[3:]
        latent, cache = self.vae.encode(image_1CTHW, None)
        state = self._encoded(ConditionState(height, width, cache, latent))
        later, state = self._stream(state, num_latents - 1)
        if self.later == "fresh_grey":
            state = replace(state.resolved(), cache=None, settled=False)
        return [latent, *later], state

    def _stream(self, state: ConditionState, num_latents: int) -> tuple[list[torch.Tensor], ConditionState]:
        """Encode up to `num_latents` more latent frames of grey, until they converge.

        The host does not wait for the result: on CUDA the encoder runs again, and the device
        discards its output after convergence.
        """
        if state.cache is None or num_latents == 0:
            return [state.last_1CFhw] * num_latents, state
        last, cache, latents = state.last_1CFhw, state.cache, []
        left = self.most_encoded - state.num_encoded if self.later == "last_frame" else num_latents + 1
        changes = torch.ones((), dtype=torch.bool, device=last.device)
        unsettled = torch.zeros((), dtype=torch.int32, device=last.device)
        for _ in range(min(num_latents, left)):
            latent, cache = self.vae.encode(self._grey_frames(state, 1), cache)
            last, changes = torch.where(changes, latent, last), changes & ~self._has_settled(last, latent)
            unsettled = unsettled + changes
            latents.append(last)
            if self._is_heard(changes) and not changes:
                break
        settling = Settling(len(latents), Arriving(unsettled), ends=left <= num_latents)
        latents += [last] * (num_latents - len(latents))
        return latents, replace(state, cache=cache, last_1CFhw=last, settling=settling)

    def _repeat(self, state: ConditionState, num_latents: int) -> tuple[list[torch.Tensor], ConditionState]:
        """Return the condition that all later chunks use, encoded at the first call."""
        if not state.settled:
            afresh = self.later == "fresh_grey"
            kept, _ = self.vae.encode(self._grey_frames(state, num_latents, first=afresh), state.cache)
            state = replace(state, cache=None, last_1CFhw=kept[:, :, -num_latents:].contiguous(), settled=True)
        if state.last_1CFhw.shape[2] == 1:  # also if encoding converged in the image's chunk
            return [state.last_1CFhw] * num_latents, state
        assert state.last_1CFhw.shape[2] == num_latents, "chunks after the first are of one size"
        return [state.last_1CFhw], state

    @staticmethod
    def _is_heard(flag: torch.Tensor) -> bool:
        """Return whether the host can read `flag` without waiting."""
        return not flag.is_cuda

    def _has_settled(self, before_1CFhw: torch.Tensor, latent_1CFhw: torch.Tensor) -> torch.Tensor:
        """Return, on the device, whether later latent frames equal `latent_1CFhw` within the
        threshold."""
        change = (latent_1CFhw - before_1CFhw).abs().max()
        return change <= _SETTLED[self.vae.dtype] * latent_1CFhw.std()

    def _encoded(self, state: ConditionState) -> ConditionState:
        """Mark a state as converged after the last frame that is to be encoded."""
        if self.later == "last_frame" and state.num_encoded >= self.most_encoded:
            return replace(state, cache=None, settled=True)
        return state

    def _grey_frames(self, state: ConditionState, num_latents: int, *, first: bool = False) -> torch.Tensor:
        """Return grey video frames for `num_latents` latent frames, plus one if they start a clip."""
        frames = int(first) + num_latents * self.vae.config.temporal_factor
        return torch.zeros(1, 3, frames, state.height, state.width, device=state.last_1CFhw.device)


# -- sessions that start with an image ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageWorld:
    """State of a session that starts from an image. Immutable."""

    condition: ConditionState | None
    """State of the condition. None on ranks that do not embed patches."""

    def tensors(self) -> dict[str, torch.Tensor]:
        kept: Mapping[str, torch.Tensor] = {} if self.condition is None else self.condition.resolved().tensors()
        return {f"condition.{name}": tensor for name, tensor in kept.items()}

    def to(self, device: torch.device | str) -> Self:
        return self if self.condition is None else replace(self, condition=self.condition.resolved().to(device))


class ImageWorldScalars(SessionScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of `ImageWorldSession.scalars`, as read from a file."""

    condition_settled: bool | None
    condition_encoded: Annotated[int, msgspec.Meta(ge=1)] = 1


World = TypeVar("World", bound=ImageWorld)


class ImageWorldSession(StreamingSession[Window, World], Generic[Window, World]):
    """A session that starts from an image; `own` is the family's `ImageWorld`."""

    scalars_type: ClassVar[type[ImageWorldScalars]] = ImageWorldScalars

    @property
    def condition(self) -> ConditionState | None:
        return None if self.own is None else self.own.condition

    def own_scalars(self) -> dict[str, Any]:
        condition = None if self.condition is None else self.condition.resolved()
        return {
            "condition_settled": None if condition is None else condition.settled,
            "condition_encoded": 1 if condition is None else condition.num_encoded,
        }

    def restore_condition(
        self, layout: ConditionLayout | None, kept: ImageWorldScalars, saved: SavedTensors, device: torch.device
    ) -> ConditionState | None:
        """Restore the condition from a snapshot.

        Args:
            layout: Shapes of the state. None: this rank has no condition.
            kept: Scalars of the snapshot.
            saved: Tensors of the snapshot.
            device: Device of the state.

        Raises:
            RequestFailed: The snapshot does not fit.
        """
        settled = kept.condition_settled
        if (layout is None) != (settled is None) or kept.condition_encoded > kept.committed_frames:
            raise RequestFailed("invalid_snapshot", "the snapshot's frames and condition do not fit together")
        if layout is None or settled is None:
            return None
        part = saved.under("condition.")
        return layout.restore(part, device, settled=settled, num_encoded=kept.condition_encoded)


def image_warmup(omni: OmniConfig, space: ActionSpace) -> list[Inputs]:
    """Return a first and a later chunk of the largest size, because a later chunk decodes more
    frames."""
    image = torch.zeros(omni.height, omni.width, 3, dtype=torch.uint8)
    prompt = None if space.prompt == "none" else "warm-up"
    first = DiffusionParams(session_id="warm-up", prompt=prompt, actions=[])
    return [(first, {"image": image}), (msgspec.structs.replace(first, prompt=None), {})]
