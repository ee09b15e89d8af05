# SPDX-License-Identifier: Apache-2.0
"""The LingBot World pipeline: each chunk takes four denoise steps and a clean-context pass.

    x = noise(seed, chunk, 0)
    for i, t in enumerate(timesteps):
        v  = transformer(x, y, camera, t)                    denoise_step
        x0 = x - sigma_i v                                   step_scheduler
        x  = (1 - s) x0 + s noise(seed, chunk, i + 1)
    transformer(x0, y, camera, 0)  # writes K/V              last denoise_step
    frames = vae.decode(x0)                                  post_decode
    advance the session                                      commit

`LingBotWorld` is the model and does not depend on the engine; vLLM loads `LingBotWorldPipeline`,
which owns the model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow, kv_window_nbytes
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.lingbot_world.camera import action_map, camera_map
from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout, find_layout
from vllm_omni.model_executor.models.lingbot_world.config import (
    LingBotOptions,
    LingBotWorldConfig,
    read_stream,
)
from vllm_omni.model_executor.models.lingbot_world.request import read_chunk
from vllm_omni.model_executor.models.lingbot_world.state import (
    ChunkInputs,
    LingBotChunk,
    LingBotSession,
    RestState,
    WorldCoordinates,
)
from vllm_omni.model_executor.models.lingbot_world.transformer import CameraItem, LingBotTransformer
from vllm_omni.model_executor.models.lingbot_world.weights import adapter_target, load_transformer
from vllm_omni.model_executor.models.lingbot_world.world_pose import world_features
from vllm_omni.model_executor.models.wan.chunk_setup import (
    WanChunkSetup,
    build_autoencoders,
    build_networks,
    load_parts,
)
from vllm_omni.model_executor.models.wan.images.files import prepare_image
from vllm_omni.model_executor.models.wan.images.image_condition import (
    ConditionLayout,
    ConditionState,
    GreyCondition,
    image_warmup,
)
from vllm_omni.model_executor.models.wan.text_encoder.prompts import encode_prompt
from vllm_omni.model_executor.schedules import ChunkNoise
from vllm_omni.model_executor.streaming.model import StreamingModel
from vllm_omni.model_executor.streaming.session import KVWindows, SessionShape
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint
from vllm_omni.worlds.served import ServedWorld

Request = DiffusionRequest[LingBotSession, LingBotChunk]


class WorldSetup(WanChunkSetup[LingBotWorldConfig, LingBotOptions]):
    """Constructor argument of `LingBotWorld`, read from `hf_config(...)["lingbot_world"]`."""

    read_stream = staticmethod(read_stream)

    layout: CheckpointLayout

    @property
    def world(self) -> ServedWorld | None:
        """Load a `world` model's world from its files. Return None for other control types.

        Raises:
            ValueError: The files are missing or invalid.
        """
        return ServedWorld.load(self.layout.root) if self.config.control_type == "world" else None


class LingBotWorld(StreamingModel[LingBotSession, LingBotChunk]):
    """One rank's LingBot World components and layers. The class implements
    `SupportsStepExecution`.
    """

    session_type = LingBotSession
    session_windows = True

    config: LingBotWorldConfig
    options: LingBotOptions

    def __init__(self, setup: WorldSetup) -> None:
        super().__init__(setup)
        choices, parallel = setup.options.choices, setup.parallel
        self.world = setup.world
        self.schedule = setup.options.denoise_schedule()
        self.text_encoder, self.image_encoder, self.transformer, self.prompts = build_networks(
            setup, LingBotTransformer, residual_fp32=choices.residual_dtype == "fp32"
        )
        # Decoding one frame at a time halves the memory that decoding needs in addition to its
        # cache. On a CPU, decoding all frames at once is faster.
        frames_per_call = 1 if self.transformer.device.type == "cuda" else None
        self.vae, self.tiny_vae, self.decoder = build_autoencoders(
            setup,
            encodes=parallel.first_stage,
            frames_per_call=frames_per_call,
            continuation=choices.vae_continuation,
        )
        self.condition: GreyCondition | None = None
        """Computes the conditioning on the start image. None on ranks that do not embed patches."""
        if parallel.first_stage:
            self.condition = GreyCondition(
                self.vae, choices.later_condition, chunk_frames=self.plan.chunk_frames
            )

    def load_checkpoint(self, layout: CheckpointLayout) -> None:
        def load() -> None:
            load_transformer(self.transformer, layout.transformer, self.config)

        if self.condition is not None:
            self.condition.clips.clear()
        load_parts(self, layout, load)

    def adapter_targets(self) -> dict[str, AdapterTarget]:
        return {"transformer": adapter_target(self.transformer, self.config)}

    # -- sessions ----------------------------------------------------------------------------------

    def read_shape(self, params: DiffusionParams) -> SessionShape:
        shape = super().read_shape(params)
        self.vae.check_height(shape.height)
        return shape

    def window_nbytes(self, shape: SessionShape) -> int:
        return kv_window_nbytes(**self.window_sizes(shape))

    def make_window(self, shape: SessionShape) -> KVWindows:
        return self.make_kv_window(shape)

    def make_kv_window(self, shape: SessionShape) -> KVWindow:
        sink_frames, rings = self.plan_of(shape).sink_frames, self.transformer.rings
        return KVWindow(sink_frames=sink_frames, rings=rings, **self.window_sizes(shape))

    def value_layout(self, shape: SessionShape) -> ConditionLayout | None:
        return (
            None
            if self.condition is None
            else self.condition.state_layout(shape.height, shape.width)
        )

    def own_bytes(self, shape: SessionShape) -> int:
        return (
            0 if self.condition is None else self.condition.state_nbytes(shape.height, shape.width)
        )

    def warmup_inputs(self) -> list[Inputs]:
        return image_warmup(self.omni, self.action_space)

    # -- one chunk ---------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        session = request.session
        inputs = read_chunk(request, session, self.options, self.config.control_type, self.world)
        frames = session.next_frames()
        shape, device = session.shape, self.transformer.device
        size = self.latent_shape(shape, len(frames))
        omitted, rest = self._rest(inputs, session, frames)
        if self.text_encoder is None:
            chunk = LingBotChunk.to_decode(
                frames,
                self.schedule,
                size,
                session.window,
                prompt=inputs.prompt,
                seed=inputs.seed,
                own=WorldCoordinates(condition=None, tail=inputs.tail, rest=rest),
                omitted=omitted,
                y=None,
                camera_map=None,
                world_poses=inputs.world_poses_of(),
            )
            self.start_chunk(request, chunk)
            return
        noise = ChunkNoise(size, inputs.seed, session.chunk_index, device)
        with request.timer.stage("condition"):
            y, condition = self._condition(inputs.image, session, frames)
        # The prompt is encoded after the kernels for `y` have been launched, so that the host
        # launches the text encoder's small kernels while the device computes `y`.
        text, known = encode_prompt(request, inputs.prompt, session, self.text_encoder, device)
        with request.timer.stage("camera"):
            rays = self._camera_map(inputs, shape)
            features = self._world_features(inputs, shape)
        chunk = LingBotChunk(
            frames=frames,
            schedule=self.chunk_schedule(request, self.schedule),
            latents=noise.draw(0),
            noise=noise,
            y=y,
            rope=self.transformer.rope(frames, size),
            camera_map=rays,
            world_features=features,
            world_poses=inputs.world_poses_of(),
            text=text,
            cross_kv=known,
            window=session.window,
            prompt=inputs.prompt,
            seed=inputs.seed,
            own=WorldCoordinates(condition=condition, tail=inputs.tail, rest=rest),
            omitted=omitted,
        )
        self.start_chunk(request, chunk)

    @torch.no_grad()
    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run `StreamingModel.denoise_step`. After a chunk's last forward pass, free its camera
        modulation, which takes up several GiB for the released model.
        """
        prediction = super().denoise_step(batch, hidden)
        for request in batch:
            if request.step == request.num_steps - 1:
                request.work.camera = None
        return prediction

    # -- steps of encoding and denoising -----------------------------------------------------------

    def _condition(
        self, image: torch.Tensor | None, session: LingBotSession, frames: range
    ) -> tuple[torch.Tensor | None, ConditionState | None]:
        """Return the chunk's conditioning y and the conditioning state after the chunk. Both are
        None on ranks that do not embed patches.
        """
        if self.condition is None:
            return None, None
        pixels = key = None
        if image is not None:
            height, width = session.shape.height, session.shape.width
            pixels = prepare_image(to_device(image, self.transformer.device), height, width)
            key = self.condition.key_of(image, height, width)
        return self.condition.next(pixels, len(frames), session.condition, key)

    def _rest(
        self, inputs: ChunkInputs, session: LingBotSession, frames: range
    ) -> tuple[bool, RestState]:
        """Return whether to omit the chunk from the K/V window, and the rest state after the
        chunk.
        """
        if self.config.control_type != "world":
            return False, session.rest
        plan = session.plan
        first = session.chunk_index == 0
        changes = {
            "moved": inputs.moves,
            "same_prompt": first or inputs.prompt == session.prompt,
        }
        if session.rest.omits_chunk(**changes, ring_frames=plan.window_frames - plan.sink_frames):
            return True, session.rest
        return False, session.rest.after_chunk(len(frames), **changes)

    def _camera_map(self, inputs: ChunkInputs, shape: SessionShape) -> torch.Tensor:
        where = (
            shape.height,
            shape.width,
            self.transformer.device,
            self.options.choices.camera_torch_dtype,
        )
        if inputs.flags_F4 is None:
            return camera_map(inputs.relative_F44, inputs.intrinsics_F4, *where)
        return action_map(inputs.relative_F44, inputs.intrinsics_F4, inputs.flags_F4, *where)

    def _world_features(self, inputs: ChunkInputs, shape: SessionShape) -> torch.Tensor | None:
        period_m = self.config.world_period_m
        if period_m is None:
            return None
        features = world_features(
            inputs.world_F44, inputs.intrinsics_F4, shape.height, shape.width, period_m
        )
        return to_device(features, self.transformer.device)

    def result_meta(self, request: Request) -> dict[str, Any]:
        poses = request.work.world_poses
        return super().result_meta(request) | ({} if poses is None else {"world_poses": poses})

    def start_step(self, request: Request) -> None:
        """Compute the prompt's K/V and the chunk's camera modulation if they do not exist yet. This
        is collective under tensor parallelism.
        """
        chunk = request.work
        self.prompts.complete_chunk(chunk)
        if chunk.camera is None:
            assert chunk.camera_map is not None
            chunk.camera = self.transformer.camera_modulation(
                chunk.camera_map, chunk.world_features
            )

    def items(self, request: Request) -> list[CameraItem]:
        """Return the batch entries of a chunk's forward pass: two for models with guidance,
        otherwise one.
        """
        chunk = request.work
        assert isinstance(chunk.window, KVWindow) and chunk.cross_kv is not None
        return [self.item(request, chunk.cross_kv, chunk.window)]

    def item(self, request: Request, cross_kv: torch.Tensor, window: KVWindow) -> CameraItem:
        chunk = request.work
        assert chunk.camera is not None
        step = chunk.denoise_index(request.step)
        return CameraItem(
            latents=chunk.latents,
            condition=chunk.y,
            timestep=0.0 if step is None else chunk.schedule.timesteps[step],
            frames=chunk.frames,
            rope=chunk.rope,
            camera=chunk.camera,
            cross_kv=cross_kv,
            window=window,
        )


class LingBotWorldPipeline(CheckpointPipeline[CheckpointLayout]):
    """Owns a `LingBotWorld`. vLLM's model loader builds this class and loads its weights."""

    def find_layout(self, path: Path) -> CheckpointLayout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[CheckpointLayout]) -> LingBotWorld:
        return LingBotWorld(WorldSetup.served(served.hf_config.lingbot_world, served))
