# SPDX-License-Identifier: Apache-2.0
"""The Matrix-Game 2.0 pipeline: each chunk takes three or four denoise steps and a clean-context
pass.

    write the keyboard K/V of the chunk's actions            first denoise_step
    x = noise(seed, chunk, 0)
    for i, t in enumerate(timesteps):
        v  = transformer(x, y, actions, t)                   denoise_step
        x0 = x - sigma_i v                                   step_scheduler
        x  = (1 - s) x0 + s noise(seed, chunk, i + 1)
    transformer(x0, y, actions, 0)  # writes K/V             last denoise_step
    frames = vae.decode(x0)                                  post_decode
    advance the session                                      commit

`MatrixGame` is the model and does not depend on the engine; vLLM loads `MatrixGamePipeline`, which
owns the model.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow, kv_window_nbytes
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.matrix_game.checkpoint import (
    CheckpointLayout,
    adapter_target,
    find_layout,
    load_transformer,
)
from vllm_omni.model_executor.models.matrix_game.config import (
    MatrixGameConfig,
    MatrixGameOptions,
    read_stream,
    schedule_of,
)
from vllm_omni.model_executor.models.matrix_game.state import (
    ActionWindows,
    MatrixGameChunk,
    MatrixGameConditioning,
    MatrixGameConditioningLayout,
    MatrixGameSession,
    action_values,
    action_windows,
)
from vllm_omni.model_executor.models.matrix_game.transformer import (
    ActionItem,
    MatrixGameTransformer,
)
from vllm_omni.model_executor.models.wan.chunk_setup import (
    WanChunkSetup,
    build_autoencoders,
    build_networks,
    load_parts,
)
from vllm_omni.model_executor.models.wan.images.files import cut_image
from vllm_omni.model_executor.models.wan.images.image_condition import (
    ConditionState,
    GreyCondition,
    image_warmup,
)
from vllm_omni.model_executor.models.wan.vae.latents import VAE_TEMPORAL
from vllm_omni.model_executor.models.wan.vae.vae import Rounding
from vllm_omni.model_executor.schedules import ChunkNoise
from vllm_omni.model_executor.streaming.model import StreamingModel
from vllm_omni.model_executor.streaming.request import read_action_frames, read_played
from vllm_omni.model_executor.streaming.session import SessionShape
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint

Request = DiffusionRequest[MatrixGameSession, MatrixGameChunk]


class MatrixGameSetup(WanChunkSetup[MatrixGameConfig, MatrixGameOptions]):
    """Arguments of `MatrixGame`, from `hf_config(...)["matrix_game"]`."""

    read_stream = staticmethod(read_stream)

    layout: CheckpointLayout


class MatrixGame(StreamingModel[MatrixGameSession, MatrixGameChunk]):
    """Implements `SupportsStepExecution` for the part of the model that this rank holds."""

    session_type = MatrixGameSession
    session_windows = True
    rounding: ClassVar[Rounding] = "truncate"
    """The conversion to uint8 truncates pixel values, as in the original."""

    config: MatrixGameConfig

    def __init__(self, setup: MatrixGameSetup) -> None:
        super().__init__(setup)
        first_stage = setup.parallel.first_stage
        self.action_space = setup.config.variant.space
        self.schedule = schedule_of(setup.config.variant, setup.options.max_steps)
        self.text_encoder, self.image_encoder, self.transformer, self.prompts = build_networks(
            setup, MatrixGameTransformer
        )
        self.vae, self.tiny_vae, self.decoder = build_autoencoders(
            setup, encodes=first_stage, rounding=self.rounding
        )
        self.condition = (
            GreyCondition(self.vae, chunk_frames=self.plan.chunk_frames) if first_stage else None
        )
        """Computes the conditioning on the start image. None on ranks that do not embed patches."""

    def load_checkpoint(self, layout: CheckpointLayout) -> None:
        def load() -> None:
            load_transformer(self.transformer, layout.open_transformer(), self.config)

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
        return sum(kv_window_nbytes(**sizes) for sizes in self._window_sizes(shape).values())

    def make_window(self, shape: SessionShape) -> ActionWindows:
        common = {
            "sink_frames": self.plan_of(shape).sink_frames,
            "rings": self.transformer.rings,
        }
        sizes = self._window_sizes(shape)
        return ActionWindows(**{name: KVWindow(**common, **own) for name, own in sizes.items()})

    def _window_sizes(self, shape: SessionShape) -> dict[str, dict[str, Any]]:
        config, parallel, heads = self.config, self.parallel, self.config.action_heads
        trunk = self.window_sizes(shape)
        action = {**trunk, "num_layers": len(self.transformer.action_blocks())}
        mouse = {
            **action,
            "num_heads": heads // parallel.size,
            "head_dim": config.mouse_width // heads,
        }
        keyboard = {
            **action,
            "num_heads": heads // parallel.tensor_size,
            "head_dim": config.keyboard_width // heads,
        }
        named = {"trunk": trunk, "mouse": mouse, "keyboard": {**keyboard, "tokens_per_frame": 1}}
        retained = (
            ["trunk", *(["mouse"] if config.mouse_dim else []), "keyboard"]
            if action["num_layers"]
            else ["trunk"]
        )
        return {name: named[name] for name in retained}

    def value_layout(self, shape: SessionShape) -> MatrixGameConditioningLayout:
        config, image = self.config, None
        if self.image_encoder is not None:
            image = ((config.text_len, config.text_dim), self.transformer.dtype)
        actions = (config.action_frames - VAE_TEMPORAL + 1, config.keyboard_dim + config.mouse_dim)
        condition = (
            None
            if self.condition is None
            else self.condition.state_layout(shape.height, shape.width)
        )
        return MatrixGameConditioningLayout(actions, image, condition)

    def own_bytes(self, shape: SessionShape) -> int:
        condition = (
            0 if self.condition is None else self.condition.state_nbytes(shape.height, shape.width)
        )
        return condition + self.value_layout(shape).nbytes

    def warmup_inputs(self) -> list[Inputs]:
        return image_warmup(self.omni, self.action_space)

    # -- one chunk ---------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        session = request.session
        session.window.check_frames(session.next_frames())
        inputs = read_played(request, session, self.action_space)
        actions = read_action_frames(
            request.params, request.tensors, self.action_space, self.plan, session.chunk_index
        )
        frames, shape, before = session.next_frames(), session.shape, session.own
        size = self.latent_shape(shape, len(frames))
        windows, newest = action_windows(
            action_values(actions, self.config.variant),
            None if before is None else before.actions,
            len(frames),
            self.config.action_frames,
        )
        given: dict[str, Any] = {"prompt": inputs.prompt, "seed": inputs.seed, "windows": windows}
        if self.image_encoder is None:
            own = MatrixGameConditioning(condition=None, actions=newest, image=None)
            self.start_chunk(
                request,
                MatrixGameChunk.to_decode(
                    frames, self.schedule, size, session.window, own=own, y=None, **given
                ),
            )
            return
        with request.timer.stage("condition"):
            image, y, condition = self._image(inputs.image, session, len(frames))
        noise = ChunkNoise(size, inputs.seed, session.chunk_index, self.transformer.device)
        cross_kv = session.cross_kv if request.same_adapters else None
        chunk = MatrixGameChunk(
            frames=frames,
            schedule=self.chunk_schedule(request, self.schedule),
            latents=noise.draw(0),
            noise=noise,
            y=y,
            rope=self.transformer.rope(frames, size),
            text=image if cross_kv is None else None,
            window=session.window,
            own=MatrixGameConditioning(condition=condition, actions=newest, image=image),
            cross_kv=cross_kv,
            **given,
        )
        self.start_chunk(request, chunk)

    # -- helpers -----------------------------------------------------------------------------------

    def _image(
        self, image: torch.Tensor | None, session: MatrixGameSession, num_frames: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, ConditionState | None]:
        """Return CLIP's hidden states for the session's image. On the first stage, also return the
        conditioning y and its next state.
        """
        pixels, device = None, self.transformer.device
        if image is not None:
            pixels = cut_image(image, session.shape.height, session.shape.width)
            assert self.image_encoder is not None
            actions = self.image_encoder.encode(pixels[:, :, 0], device).to(self.transformer.dtype)
        else:
            assert session.own is not None and session.own.image is not None
            actions = session.own.image
        if self.condition is None:
            return actions, None, None
        if image is None or pixels is None:
            return actions, *self.condition.next(None, num_frames, session.condition)
        key = self.condition.key_of(image, session.shape.height, session.shape.width)
        return actions, *self.condition.next(pixels.to(device), num_frames, session.condition, key)

    def start_step(self, request: Request) -> None:
        """Compute the actions, the keyboard K/V and the image K/V once per chunk. The call is
        collective under tensor parallelism.
        """
        chunk = request.work
        if chunk.actions is not None:
            return
        keys, buffers = self.config.keyboard_dim, chunk.window.tokens_per_frame
        mouse = chunk.windows[..., keys:] if self.config.mouse_dim else None
        chunk.actions = self.transformer.actions(mouse, chunk.frames, buffers)
        self.transformer.write_keyboard(chunk.window, chunk.frames, chunk.windows[..., :keys])
        if chunk.cross_kv is None:
            assert chunk.text is not None
            chunk.cross_kv = self.transformer.cross_attention_kv(chunk.text)

    def items(self, request: Request) -> list[ActionItem]:
        chunk = request.work
        assert chunk.cross_kv is not None
        step = chunk.denoise_index(request.step)
        row = ActionItem(
            latents=chunk.latents,
            condition=chunk.y,
            timestep=0.0 if step is None else chunk.schedule.timesteps[step],
            frames=chunk.frames,
            rope=chunk.rope,
            cross_kv=chunk.cross_kv,
            window=chunk.window,
            **chunk.actions,
        )
        return [row]


class MatrixGamePipeline(CheckpointPipeline[CheckpointLayout]):
    """Owns a `MatrixGame`. vLLM's model loader builds this class and loads its weights."""

    def find_layout(self, path: Path) -> CheckpointLayout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[CheckpointLayout]) -> MatrixGame:
        return MatrixGame(MatrixGameSetup.served(served.hf_config.matrix_game, served))
