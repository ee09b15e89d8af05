# SPDX-License-Identifier: Apache-2.0
"""The ABot-World-0 pipeline: each chunk takes four denoise steps and a clean-context pass.

    x = noise(seed, chunk, 0); in the first chunk, frame 0 is the start image
    for i, t in enumerate(timesteps):
        v  = transformer(x, references, keys, t)             denoise_step
        x0 = x - sigma_i v                                   step_scheduler
        x  = (1 - s) x0 + s noise(seed, chunk, i + 1); frame 0 is the start image again
    transformer(x0, references, keys, 0)  # writes K/V       last denoise_step
    frames = vae.decode(x0)                                  post_decode
    advance the session and its base                         commit

All forward passes of the first chunk include the references. Later chunks attend to the references'
K/V. `AbotWorld` is the model and does not depend on the engine; vLLM loads `AbotWorldPipeline`,
which owns the model.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs
from vllm_omni.model_executor.layers.kv_cache.pinned_window import (
    PinnedWindow,
    pinned_extra_nbytes,
)
from vllm_omni.model_executor.layers.kv_cache.window import kv_window_nbytes
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.abot_world.checkpoint import (
    CheckpointLayout,
    adapter_target,
    find_layout,
    load_transformer,
)
from vllm_omni.model_executor.models.abot_world.config import (
    AbotWorldConfig,
    AbotWorldOptions,
    read_stream,
    space_of,
)
from vllm_omni.model_executor.models.abot_world.transformer import AbotItem, AbotWorldTransformer
from vllm_omni.model_executor.models.wan.chunk_setup import (
    WanChunkSetup,
    build_autoencoders,
    build_networks,
    load_parts,
)
from vllm_omni.model_executor.models.wan.images.files import (
    fit_image,
    image_pixels,
    stretch_images,
)
from vllm_omni.model_executor.models.wan.images.image_condition import image_warmup
from vllm_omni.model_executor.models.wan.text_encoder.prompts import encode_prompt
from vllm_omni.model_executor.models.wan.vae.vae import Rounding
from vllm_omni.model_executor.schedules import ChunkNoise, FewStepSchedule
from vllm_omni.model_executor.streaming.model import StreamingModel
from vllm_omni.model_executor.streaming.pinned import FramePositions, PinnedSession, next_base
from vllm_omni.model_executor.streaming.request import read_latent_actions, read_played
from vllm_omni.model_executor.streaming.session import (
    SessionShape,
    StreamingChunk,
)
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint


@dataclass(eq=False, kw_only=True)
class AbotChunk(StreamingChunk[PinnedWindow, FramePositions]):
    """One chunk in flight. `own` is the value of `StreamingSession.own` after the chunk."""

    schedule: FewStepSchedule
    """The chunk's denoise schedule."""
    keys_FK: torch.Tensor
    """Keyboard keys held in each latent frame, fp32 on the host."""
    keys: torch.Tensor | None = None
    """Result of `AbotWorldTransformer.embed_keys`, set before the chunk's first forward pass."""
    references: torch.Tensor | None = None
    """Result of `AbotWorldTransformer.reference_patches`. None in later chunks and on later stages.
    """
    given: torch.Tensor | None = None
    """Mask of the given references, fp32 [slots]: 1.0 for a given reference and 0.0 for a missing
    one."""


Request = DiffusionRequest[PinnedSession, AbotChunk]


class AbotWorldSetup(WanChunkSetup[AbotWorldConfig, AbotWorldOptions]):
    """Arguments of `AbotWorld`, from `hf_config(...)["abot_world"]`."""

    read_stream = staticmethod(read_stream)

    layout: CheckpointLayout


class AbotWorld(StreamingModel[PinnedSession, AbotChunk]):
    """Implements `SupportsStepExecution` for the part of the model that this rank holds."""

    session_type = PinnedSession
    session_windows = True
    rounding: ClassVar[Rounding] = "truncate"
    """The conversion to uint8 truncates pixel values, as in the original."""

    config: AbotWorldConfig
    options: AbotWorldOptions

    def __init__(self, setup: AbotWorldSetup) -> None:
        super().__init__(setup)
        self.action_space = space_of(setup.config)
        self.schedule = setup.options.schedule()
        self.text_encoder, self.image_encoder, self.transformer, self.prompts = build_networks(
            setup, AbotWorldTransformer
        )
        # Every rank that holds layers encodes the start image, because the noisy latents that it
        # needs contain the image.
        self.vae, self.tiny_vae, self.decoder = build_autoencoders(
            setup, encodes=not setup.parallel.is_vae_stage, rounding=self.rounding
        )

    def load_checkpoint(self, layout: CheckpointLayout) -> None:
        def load() -> None:
            load_transformer(self.transformer, layout.open_transformer(), self.config)

        load_parts(self, layout, load)

    def adapter_targets(self) -> dict[str, AdapterTarget]:
        return {"transformer": adapter_target(self.transformer, self.config)}

    # -- sessions ----------------------------------------------------------------------------------

    def read_shape(self, params: DiffusionParams) -> SessionShape:
        shape = super().read_shape(params)
        self.vae.check_height(shape.height)
        return shape

    def window_nbytes(self, shape: SessionShape) -> int:
        sizes = self.window_sizes(shape)
        pinned = ("num_layers", "pinned_tokens", "num_heads", "head_dim", "dtype", "storage")
        extra = pinned_extra_nbytes(**{name: sizes[name] for name in pinned})
        return kv_window_nbytes(**sizes) + extra

    def make_window(self, shape: SessionShape) -> PinnedWindow:
        sizes = self.window_sizes(shape)
        return PinnedWindow(sink_frames=0, rings=self.transformer.rings, **sizes)

    def warmup_inputs(self) -> list[Inputs]:
        return image_warmup(self.omni, self.action_space)

    # -- one chunk ---------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        session, device = request.session, self.transformer.device
        frames, shape = session.next_frames(), session.shape
        session.window.check_frames(frames)
        inputs = read_played(request, session, self.action_space)
        held = read_latent_actions(
            request.params, request.tensors, self.action_space, len(frames)
        ).buttons_NB
        size = self.latent_shape(shape, len(frames))
        window = session.plan.window_frames
        base = next_base(session.base, frames, window, self.options.positions)
        common: dict[str, Any] = {
            "prompt": inputs.prompt,
            "seed": inputs.seed,
            "own": FramePositions(base),
            "keys_FK": held.float(),
        }
        if self.text_encoder is None:
            self.start_chunk(
                request,
                AbotChunk.to_decode(frames, self.schedule, size, session.window, **common),
            )
            return
        noise = ChunkNoise(size, inputs.seed, session.chunk_index, device)
        latents = noise.draw(0)
        with request.timer.stage("image"):
            if inputs.image is not None:
                fitted = fit_image(inputs.image, shape.height, shape.width)
                latents[:, :1] = self._encode([fitted])[0]
            first = session.chunk_index == 0
            references = self._references(inputs.images) if first else {}
        text, known = encode_prompt(request, inputs.prompt, session, self.text_encoder, device)
        chunk = AbotChunk(
            frames=frames,
            schedule=self.chunk_schedule(request, self.schedule),
            latents=latents,
            noise=noise,
            rope=self.transformer.chunk_rope(frames, size, lead=first),
            text=text,
            window=session.window,
            cross_kv=known,
            given_frames=0 if inputs.image is None else 1,
            **references,
            **common,
        )
        self.start_chunk(request, chunk)

    def batch_key(self, request: Request) -> Hashable:
        return super().batch_key(request), self._lead_tokens(request.work)

    # -- helpers -----------------------------------------------------------------------------------

    def _encode(self, images_HWC: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the latents of uint8 images of equal size, fp32 [N, C, 1, h, w] on the device."""
        device = self.transformer.device
        pixels = [image_pixels(to_device(image_HWC, device)) for image_HWC in images_HWC]
        return self.vae.encode(torch.cat(pixels), None)[0].float()

    def _references(self, images: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the `references` and `given` fields for a session's first chunk. Missing
        references are zeros. On stages other than the first, the result is empty.
        """
        config, device = self.config, self.transformer.device
        if not (self.parallel.first_stage and config.reference_slots):
            return {}
        side = config.reference_size
        cells = config.latent_size(side, side)
        names = self.action_space.image_names
        given = torch.tensor([float(name in images) for name in names])
        latents = torch.zeros(len(names), config.in_channels, *cells, device=device)
        if images:
            resized = stretch_images([images[name] for name in names if name in images], side)
            latents[given.bool()] = self._encode(resized)[:, :, 0]
        return {
            "references": self.transformer.reference_patches(latents),
            "given": to_device(given, device),
        }

    def _lead_tokens(self, chunk: AbotChunk) -> int:
        return self.config.reference_tokens if chunk.frames.start == 0 else 0

    def start_step(self, request: Request) -> None:
        """Rotate the references to their positions for this chunk. Also compute the prompt's K/V
        and the keyboard embedding if they have not been computed yet. The call is collective under
        tensor parallelism.
        """
        chunk = request.work
        self.prompts.complete_chunk(chunk)
        assert chunk.own is not None
        chunk.window.place_pinned(chunk.own.base)
        if chunk.keys is None and self.parallel.first_stage:
            chunk.keys = self.transformer.embed_keys(chunk.keys_FK, chunk.latents.shape)

    def items(self, request: Request) -> list[AbotItem]:
        chunk = request.work
        assert chunk.cross_kv is not None
        step, lead = chunk.denoise_index(request.step), self._lead_tokens(chunk)
        per_frame = chunk.window.tokens_per_frame
        clean = 0 if step is None else lead + chunk.given_frames * per_frame
        row = AbotItem(
            latents=chunk.latents,
            timestep=0.0 if step is None else chunk.schedule.timesteps[step],
            clean_tokens=clean,
            lead_tokens=lead,
            frames=chunk.frames,
            rope=chunk.rope,
            cross_kv=chunk.cross_kv,
            window=chunk.window,
            keys=chunk.keys,
            references=chunk.references,
            given=chunk.given,
        )
        return [row]


class AbotWorldPipeline(CheckpointPipeline[CheckpointLayout]):
    """Owns an `AbotWorld`. vLLM's model loader builds this class and loads its weights."""

    def find_layout(self, path: Path) -> CheckpointLayout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[CheckpointLayout]) -> AbotWorld:
        return AbotWorld(AbotWorldSetup.served(served.hf_config.abot_world, served))
