# SPDX-License-Identifier: Apache-2.0
"""LingBot-World v2 before distillation (`causal pretrain`), which runs 40 UniPC steps per chunk
with classifier-free guidance.

    x = noise(seed, chunk, 0)
    for t in 40 timesteps:
        c, u = transformer(x, y, camera, t)      # prompt and negative prompt, each with its window
        x = unipc(u + 5 (c - u))                 # each chunk starts with a new solver
    transformer(x, y, camera, 0)                 # both branches write K/V

Everything else is inherited from `LingBotWorld`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.layers.kv_cache.window_set import WindowSet
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout, find_layout
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld, Request, WorldSetup
from vllm_omni.model_executor.models.lingbot_world.state import LingBotChunk
from vllm_omni.model_executor.models.lingbot_world.transformer import CameraItem
from vllm_omni.model_executor.models.wan.text_encoder.prompts import SharedPrompts
from vllm_omni.model_executor.schedules import FewStepSchedule
from vllm_omni.model_executor.streaming.session import SessionShape
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint

STEPS = 40
GUIDANCE = 5.0
_SIGMA_MAX = 0.999
NEGATIVE_PROMPT = (
    "画面突变，色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)
"""Wan 2.1's default negative prompt (Apache-2.0), preceded by a phrase for "sudden changes of the
image".
"""


def unipc(shift: float, device: torch.device | str = "cpu") -> Any:
    """Return a new solver for one chunk: diffusers' second-order UniPC scheduler with flow
    prediction, positioned at the first step.

    Args:
        shift: Timestep shift towards noise (`flow_shift`).
        device: Device of the timesteps.
    """
    from diffusers import UniPCMultistepScheduler

    solver: Any = UniPCMultistepScheduler(
        num_train_timesteps=1000,
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
    )
    # The original's sigmas run from 0.999 to 0, whereas diffusers' sigmas run from 1 to 0.001.
    sigmas = np.linspace(_SIGMA_MAX, 0.0, STEPS + 1)[:-1]
    solver.set_timesteps(num_inference_steps=STEPS, sigmas=sigmas, device=device)
    solver.set_begin_index(0)
    return solver


def solver_step(solver: Any, step: int, latents: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """Return the latents after `step`, fp32 [16, F, h, w]. The call advances the solver's state."""
    moved: torch.Tensor = solver.step(
        flow[None], solver.timesteps[step], latents[None], return_dict=False
    )[0][0]
    return moved


def guided(cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
    """Combine the two predicted flows by classifier-free guidance with scale `GUIDANCE`."""
    return uncond + GUIDANCE * (cond - uncond)


class GuidedWindows(WindowSet):
    """A session's two K/V windows: one for the prompt and one for the negative prompt."""

    def __init__(self, cond: KVWindow, uncond: KVWindow) -> None:
        super().__init__({"cond.": cond, "uncond.": uncond})


@dataclass(eq=False, kw_only=True)
class GuidedChunk(LingBotChunk):
    """Working set of a chunk with guidance."""

    negative_text: torch.Tensor
    """Embeddings of the negative prompt."""
    solver: Any
    """The chunk's solver. It retains the history of its multi-step method between denoise steps."""

    negative_kv: torch.Tensor | None = None
    """Cross-attention K/V of the negative prompt. None until the first step computes them."""


class LingBotPretrain(LingBotWorld):
    """A `LingBotWorld` with classifier-free guidance (two batch entries per forward pass) and a
    multi-step solver.
    """

    def __init__(self, setup: WorldSetup) -> None:
        super().__init__(setup)
        self.shift = setup.options.resolved_shift
        solver = unipc(self.shift)
        timesteps = tuple(float(t) for t in solver.timesteps.tolist())
        sigmas = tuple(float(sigma) for sigma in solver.sigmas.tolist()[:STEPS])
        self.schedule = FewStepSchedule(timesteps, sigmas, sigmas)
        self.negative = SharedPrompts(self.transformer.cross_attention_kv)

    def load_checkpoint(self, layout: CheckpointLayout) -> None:
        super().load_checkpoint(layout)
        self.negative.clear_prompt()

    def move_layers(self, move: LayerMove) -> None:
        super().move_layers(move)
        self.negative.clear_prompt()

    def window_nbytes(self, shape: SessionShape) -> int:
        return 2 * super().window_nbytes(shape)

    def make_window(self, shape: SessionShape) -> GuidedWindows:
        return GuidedWindows(self.make_kv_window(shape), self.make_kv_window(shape))

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        super().prepare_encode(request)
        if self.text_encoder is None:
            return
        with request.timer.stage("text"):
            negative = self.text_encoder.encode(NEGATIVE_PROMPT, self.transformer.device)
        solver = unipc(self.shift, self.transformer.device)
        request.state = GuidedChunk(**vars(request.work), negative_text=negative, solver=solver)

    def texts(self, request: Request) -> list[torch.Tensor]:
        return [*super().texts(request), _guided_chunk(request).negative_text]

    @torch.no_grad()
    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        prediction = super().denoise_step(batch, hidden)
        if not self.parallel.last_stage:
            return prediction
        return guided(prediction[0::2], prediction[1::2])

    @torch.no_grad()
    def step_scheduler(self, batch: Sequence[Request], prediction: torch.Tensor) -> None:
        for request, flow in zip(batch, prediction, strict=True):
            chunk = _guided_chunk(request)
            step = chunk.denoise_index(request.step)
            if step is not None:
                chunk.latents = solver_step(chunk.solver, step, chunk.latents, flow)

    def start_step(self, request: Request) -> None:
        super().start_step(request)
        chunk = _guided_chunk(request)
        if chunk.negative_kv is None:
            chunk.negative_kv = self.negative.get(NEGATIVE_PROMPT, chunk.negative_text)

    def items(self, request: Request) -> list[CameraItem]:
        chunk = _guided_chunk(request)
        assert (
            isinstance(chunk.window, GuidedWindows)
            and chunk.cross_kv is not None
            and chunk.negative_kv is not None
        )
        cond, uncond = chunk.window.windows
        return [
            self.item(request, chunk.cross_kv, cond),
            self.item(request, chunk.negative_kv, uncond),
        ]


def _guided_chunk(request: Request) -> GuidedChunk:
    assert isinstance(request.work, GuidedChunk)
    return request.work


class LingBotPretrainPipeline(CheckpointPipeline[CheckpointLayout]):
    """Owns a `LingBotPretrain`. vLLM's model loader builds this class and loads its weights."""

    def find_layout(self, path: Path) -> CheckpointLayout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[CheckpointLayout]) -> LingBotPretrain:
        return LingBotPretrain(WorldSetup.served(served.hf_config.lingbot_world, served))
