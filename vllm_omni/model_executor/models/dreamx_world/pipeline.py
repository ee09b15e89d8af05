# SPDX-License-Identifier: Apache-2.0
"""The DreamX-World pipeline: each chunk takes four denoise steps and a context pass at t = 0.1.

    x = noise(seed, chunk, 0)
    for i, t in enumerate(timesteps):
        v  = transformer(x, camera, t)                       denoise_step
        x0 = x - sigma_i v                                   step_scheduler
        x  = (1 - s) x0 + s noise(seed, chunk, i + 1)
    transformer(x0, camera, 0.1)  # writes K/V               last denoise_step
    frames = correct_colours(vae.decode(x0))                 post_decode
    advance the session                                      commit

In the first chunk, latent frame 0 of x is the start image in every step, at timestep 0. In the
original, a frame's position is its slot in the window. Attention depends only on position
differences, so in this implementation frames keep their absolute positions and the sink frames move
with the window (`SinkWindow`).

`DreamXWorld` is the model and does not depend on the engine; vLLM loads `DreamXWorldPipeline`,
which owns the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from vllm_omni.actions import ACTION_TENSORS, CAMERA_SPACE
from vllm_omni.config import parse_options
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs
from vllm_omni.model_executor.layers.kv_cache.sink_window import (
    SinkWindow,
    sink_window_extra_nbytes,
)
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow, kv_window_nbytes
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.dreamx_world.camera import (
    CameraState,
    ChunkCamera,
    read_camera,
)
from vllm_omni.model_executor.models.dreamx_world.checkpoint import (
    CheckpointLayout,
    adapter_target,
    find_layout,
    load_transformer,
)
from vllm_omni.model_executor.models.dreamx_world.config import (
    DreamXConfig,
    DreamXOptions,
    check_sinks,
    read_stream,
    rounded_timestep,
)
from vllm_omni.model_executor.models.dreamx_world.transformer import DreamXTransformer, PosedItem
from vllm_omni.model_executor.models.wan.chunk_setup import (
    WanChunkSetup,
    build_autoencoders,
    build_networks,
    load_parts,
)
from vllm_omni.model_executor.models.wan.images.files import cut_image
from vllm_omni.model_executor.models.wan.images.image_condition import image_warmup
from vllm_omni.model_executor.models.wan.text_encoder.prompts import encode_prompt
from vllm_omni.model_executor.models.wan.vae.color_correction import CorrectingDecoder
from vllm_omni.model_executor.schedules import ChunkNoise, FewStepSchedule
from vllm_omni.model_executor.streaming.model import (
    ChunkLatentsDecoder,
    StreamingModel,
)
from vllm_omni.model_executor.streaming.request import (
    check_tensors,
    check_unchanged,
    check_unused,
    read_image,
    read_seed,
)
from vllm_omni.model_executor.streaming.session import (
    SessionScalars,
    SessionShape,
    StreamingChunk,
    StreamingSession,
)
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors

_TENSORS = ("image", "poses", "intrinsics", *ACTION_TENSORS)


class DreamXSession(StreamingSession[KVWindow, CameraState]):
    """A DreamX-World session. Its only family-specific state is the camera state."""

    def restore_values(
        self, retained: SessionScalars, saved: SavedTensors, device: torch.device
    ) -> CameraState:
        pose, reference = (
            saved.take_tensor(f"camera.{name}", "cpu", torch.float64, [4, 4])
            for name in ("pose", "reference")
        )
        return CameraState(pose, reference)


@dataclass(eq=False, kw_only=True)
class DreamXChunk(StreamingChunk[KVWindow, CameraState]):
    """One chunk in flight. `own` is the camera state after the chunk."""

    schedule: FewStepSchedule
    """The chunk's denoise schedule."""
    color_correction: float
    """Strength of the colour correction in [0, 1]."""
    camera: torch.Tensor | None = None
    """The chunk's camera matrices (`PosedItem.camera`). None on the VAE stage."""


class ChunkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`DiffusionParams.options` of one chunk."""

    color_correction: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Strength of the colour correction for this chunk's frames. Default: the server option's
    value."""


@dataclass(frozen=True)
class ChunkInputs:
    """A validated request for one chunk."""

    prompt: str
    """Prompt of the chunk."""
    seed: int
    """Seed of the chunk's noise."""
    image: torch.Tensor | None
    """Start image for the first chunk of a session, uint8 [H, W, 3] of any size."""
    camera: ChunkCamera
    """The chunk's camera input."""
    color_correction: float
    """Strength of the colour correction in [0, 1]."""


Request = DiffusionRequest[DreamXSession, DreamXChunk]


def read_chunk(request: Request, served: DreamXOptions) -> ChunkInputs:
    """Validate a chunk request against its session. Raises `RequestFailed` if the request is
    invalid.
    """
    params, session = request.params, request.session
    session.window.check_frames(session.next_frames())
    check_unused(params, actions=True)
    check_unchanged(params, session.shape, {})
    check_tensors(request.tensors, _TENSORS)
    first = session.chunk_index == 0
    image = read_image(request.tensors.get("image"), first_chunk=first)
    if image is not None and not first:
        raise RequestFailed(
            "invalid_image",
            "a session has one start image; reset the session to start from another",
        )
    prompt = session.prompt if params.prompt is None else params.prompt
    if not prompt:
        raise RequestFailed(
            "invalid_request", "prompt must not be empty; a session's first chunk needs one"
        )
    try:
        strength = parse_options(ChunkOptions, params.options, "options").color_correction
    except ValueError as error:
        raise RequestFailed("invalid_request", str(error)) from error
    return ChunkInputs(
        prompt=prompt,
        seed=read_seed(params, session.seed),
        image=image,
        camera=read_camera(request, session.chunk_index, session.own, session.plan, served),
        color_correction=served.color_correction if strength is None else strength,
    )


class DreamXSetup(WanChunkSetup[DreamXConfig, DreamXOptions]):
    """Arguments of `DreamXWorld`, from `hf_config(...)["dreamx_world"]`."""

    read_stream = staticmethod(read_stream)

    layout: CheckpointLayout


class DreamXWorld(StreamingModel[DreamXSession, DreamXChunk]):
    """Implements `SupportsStepExecution` for the part of the model that this rank holds."""

    session_type = DreamXSession
    session_windows = True
    action_space = CAMERA_SPACE

    config: DreamXConfig
    options: DreamXOptions
    decoder: CorrectingDecoder | None

    def __init__(self, setup: DreamXSetup) -> None:
        super().__init__(setup)
        rounded = setup.options.rounds_timesteps(setup.dtype)
        self.schedule = setup.options.schedule(rounded=rounded)
        context = setup.options.context_timestep
        self.context_timestep = rounded_timestep(context) if rounded else context
        self.text_encoder, self.image_encoder, self.transformer, self.prompts = build_networks(
            setup, DreamXTransformer
        )
        # Every rank that holds layers encodes the start image. The first stage reads the image's
        # latents, and the last stage retains them.
        self.vae, self.tiny_vae, decoder = build_autoencoders(
            setup, encodes=not setup.parallel.is_vae_stage, rounding="truncate"
        )
        self.decoder = (
            None
            if decoder is None
            else CorrectingDecoder(decoder, setup.options.color_correction, compiled=setup.compiled)
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
        try:
            check_sinks(self.plan_of(shape))
        except ValueError as error:
            raise RequestFailed("invalid_request", str(error)) from error
        return shape

    def window_nbytes(self, shape: SessionShape) -> int:
        sizes, plan = self._window_sizes(shape), self.plan_of(shape)
        total = kv_window_nbytes(window_frames=plan.window_frames, **sizes)
        if self._moves_sinks(shape):
            total += sink_window_extra_nbytes(sink_frames=plan.sink_frames, **sizes)
        return total

    def make_window(self, shape: SessionShape) -> KVWindow:
        plan = self.plan_of(shape)
        sizes = {
            **self._window_sizes(shape),
            "window_frames": plan.window_frames,
            "sink_frames": plan.sink_frames,
            "device": self.transformer.device,
            "rings": self.transformer.rings,
        }
        return SinkWindow(moving=True, **sizes) if self._moves_sinks(shape) else KVWindow(**sizes)

    def _moves_sinks(self, shape: SessionShape) -> bool:
        plan = self.plan_of(shape)
        return 0 < plan.sink_frames < plan.window_frames

    def _window_sizes(self, shape: SessionShape) -> dict[str, Any]:
        tokens = self.config.tokens_per_frame(shape.height, shape.width)
        return {**self.transformer.window_sizes(tokens), "storage": self.kv_dtype}

    def own_bytes(self, shape: SessionShape) -> int:
        return 2 * 16 * torch.float64.itemsize

    def warmup_inputs(self) -> list[Inputs]:
        return image_warmup(self.omni, self.action_space)

    # -- one chunk ---------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        session, device = request.session, self.transformer.device
        inputs = read_chunk(request, self.options)
        frames, shape = session.next_frames(), session.shape
        size = self.latent_shape(shape, len(frames))
        given: dict[str, Any] = {
            "prompt": inputs.prompt,
            "seed": inputs.seed,
            "own": inputs.camera.after,
            "color_correction": inputs.color_correction,
        }
        if self.text_encoder is None:
            self.start_chunk(
                request,
                DreamXChunk.to_decode(frames, self.schedule, size, session.window, **given),
            )
            return
        noise = ChunkNoise(size, inputs.seed, session.chunk_index, device)
        latents = noise.draw(0)
        if inputs.image is not None:
            with request.timer.stage("image"):
                pixels = cut_image(inputs.image, shape.height, shape.width).to(device)
                latents[:, :1] = self.vae.encode(pixels, None)[0][0].float()
        text, known = encode_prompt(request, inputs.prompt, session, self.text_encoder, device)
        chunk = DreamXChunk(
            frames=frames,
            schedule=self.chunk_schedule(request, self.schedule),
            latents=latents,
            noise=noise,
            rope=self.transformer.rope(frames, size),
            text=text,
            window=session.window,
            cross_kv=known,
            camera=self.transformer.camera(inputs.camera.matrices_2F44, size),
            given_frames=0 if inputs.image is None else 1,
            **given,
        )
        self.start_chunk(request, chunk)

    def start_step(self, request: Request) -> None:
        """Compute the prompt's K/V and move the sink frames, once per chunk. The call is collective
        under tensor parallelism.
        """
        chunk = request.work
        self.prompts.complete_chunk(chunk)
        if request.step == 0 and isinstance(chunk.window, SinkWindow):
            chunk.window.open(chunk.frames)

    def items(self, request: Request) -> list[PosedItem]:
        chunk = request.work
        assert chunk.cross_kv is not None and chunk.camera is not None
        step = chunk.denoise_index(request.step)
        clean_frames = 0 if step is None else chunk.given_frames
        item = PosedItem(
            latents=chunk.latents,
            timestep=self.context_timestep if step is None else chunk.schedule.timesteps[step],
            clean_tokens=clean_frames * chunk.window.tokens_per_frame,
            frames=chunk.frames,
            rope=chunk.rope,
            cross_kv=chunk.cross_kv,
            window=chunk.window,
            camera=chunk.camera,
        )
        return [item]

    def decoder_of(self, request: Request) -> ChunkLatentsDecoder | None:
        if self.decoder is None:
            return None
        return self.decoder.with_strength(request.work.color_correction)


class DreamXWorldPipeline(CheckpointPipeline[CheckpointLayout]):
    """Owns a `DreamXWorld`. vLLM's model loader builds this class and loads its weights."""

    def find_layout(self, path: Path) -> CheckpointLayout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[CheckpointLayout]) -> DreamXWorld:
        return DreamXWorld(DreamXSetup.served(served.hf_config.dreamx_world, served))
