# SPDX-License-Identifier: Apache-2.0
"""`NullImagePipeline`: generates images and videos without a network, to test and measure the code
around a model.

`NullImagePipeline` follows the contract of one-shot models (entrypoints/openai/__init__.py) and
takes almost no time. An image depends only on prompts, seed, steps, guidance and input images. The
image does not depend on the other requests in its batch or on how the `n` images are split into
requests. `DiffusionParams.options` can delay a request or make it fail (`NullFaults`).

An image consists of squares of 8 x 8 pixels, one per latent, each in the colour of its latent. The
first square has the mean colour of all input images, or is black if there are none. The grey level
of the second square is 10 times the number of input images, plus 100 if there is a mask. In a
video, all pixels of frame n have the value n % 256, except for the first square.
"""

import hashlib
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs, SupportsStepExecution
from vllm_omni.model_executor.one_shot import OneShotSession
from vllm_omni.model_executor.vllm_model import StepPipeline
from vllm_omni.outputs import RequestFailed, empty_result
from vllm_omni.seeds import nth_seed
from vllm_omni.testing.null.image.family import CAPABILITIES
from vllm_omni.testing.null.world.pipeline import NullFaults

SQUARE = 8
LATENT_CHANNELS = 3


@dataclass
class _Image:
    """Working set of an image or video request."""

    latents_NCHW: torch.Tensor
    """Current latents of the request."""
    faults: NullFaults
    """Delays and failures of the request."""
    mean_C: torch.Tensor
    """Mean colour of the input images, uint8 [3]."""
    input_level: int
    """Grey level of the second square."""


Request = DiffusionRequest[OneShotSession, _Image]


class NullImagePipeline(StepPipeline):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        self.gain = nn.Parameter(torch.ones(1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = dict(weights)
        if set(loaded) != {"gain"} or loaded["gain"].shape != self.gain.shape:
            raise ValueError(f"expected one tensor 'gain' of shape (1,), got {sorted(loaded)[:3]}")
        self.gain.data.copy_(loaded["gain"])
        return {"gain"}

    def _latent_shape(self, params: DiffusionParams) -> tuple[int, int, int, int]:
        height, width = params.height or self.omni.height, params.width or self.omni.width
        if height % SQUARE or width % SQUARE or height * width > self.omni.max_area:
            raise RequestFailed(
                "unsupported_size",
                f"{width}x{height} arrived; width and height must be multiples of {SQUARE} with "
                "at most "
                f"{self.omni.max_area} pixels",
            )
        return params.num_images, LATENT_CHANNELS, height // SQUARE, width // SQUARE

    def session_nbytes(self, params: DiffusionParams) -> int:
        count, channels, high, wide = self._latent_shape(params)
        return 4 * count * channels * high * wide

    def new_session(self, params: DiffusionParams) -> OneShotSession:
        if not params.one_shot:
            raise RequestFailed(
                "invalid_request", "this model makes single images and videos: send one_shot"
            )
        return OneShotSession(params.session_id, self.session_nbytes(params))

    def prepare_encode(self, request: Request) -> None:
        params = request.params
        try:
            faults = parse_options(NullFaults, params.options, "options")
        except ValueError as error:
            raise RequestFailed("invalid_request", str(error)) from error
        time.sleep(faults.prepare_ms / 1e3)
        if faults.fail_in == "prepare":
            raise RuntimeError("injected failure")
        mean_C, level = _look_at_inputs(request.tensors)
        steps = params.num_inference_steps or CAPABILITIES.num_inference_steps
        guidance = (
            CAPABILITIES.guidance_scale if params.guidance_scale is None else params.guidance_scale
        )
        assert steps is not None
        shape = self._latent_shape(params)
        key = (
            f"{params.prompt}|{params.negative_prompt}|{steps}|{guidance}|{mean_C.tolist()}|"
            f"{level}|{shape[1:]}"
        )
        noise = [
            _noise(f"{key}|{nth_seed(params.seed or 0, number)}", shape[1:])
            for number in range(shape[0])
        ]
        request.state = _Image(torch.stack(noise).to(self.gain.device), faults, mean_C, level)
        request.num_steps = steps

    def batch_key(self, request: Request) -> Hashable:
        return request.work.latents_NCHW.shape

    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        for request in batch:
            faults = request.work.faults
            time.sleep(faults.step_ms / 1e3)
            if faults.fail_in == "denoise" and request.step == faults.fail_at:
                raise RuntimeError("injected failure")
        return torch.tanh(torch.stack([request.work.latents_NCHW for request in batch]) * self.gain)

    def step_scheduler(self, batch: Sequence[Request], prediction: torch.Tensor) -> None:
        for request, x0_NCHW in zip(batch, prediction, strict=True):
            state = request.work
            left = request.num_steps - request.step
            state.latents_NCHW = state.latents_NCHW + (x0_NCHW - state.latents_NCHW) / left
            if state.faults.nan_at == request.step:
                state.latents_NCHW = state.latents_NCHW * float("nan")

    def latents(self, request: Request) -> torch.Tensor:
        return request.work.latents_NCHW

    def set_latents(self, request: Request, latents: torch.Tensor) -> None:
        request.work.latents_NCHW = latents.clone()

    def post_decode(self, request: Request) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        params, state = request.params, request.work
        time.sleep(state.faults.decode_ms / 1e3)
        if state.faults.fail_in == "decode":
            raise RuntimeError("injected failure")
        meta = {"seed": params.seed or 0, "num_inference_steps": request.num_steps}
        if params.output == "latents":
            return meta, {"latents": state.latents_NCHW}
        count, _, high, wide = state.latents_NCHW.shape
        if params.num_frames is None:
            images_NHWC = empty_result((count, high * SQUARE, wide * SQUARE, 3), torch.uint8)
            levels_NHWC = (
                ((state.latents_NCHW + 1) * 127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
            )
            images_NHWC.copy_(levels_NHWC.repeat_interleave(SQUARE, 1).repeat_interleave(SQUARE, 2))
            images_NHWC[:, :SQUARE, :SQUARE] = state.mean_C
            images_NHWC[:, :SQUARE, SQUARE : 2 * SQUARE] = state.input_level
            return meta, {"images": images_NHWC}
        frames_THWC = empty_result(
            (params.num_frames, high * SQUARE, wide * SQUARE, 3), torch.uint8
        )
        for number in range(params.num_frames):
            frames_THWC[number].fill_(number % 256)
        frames_THWC[:, :SQUARE, :SQUARE] = state.mean_C
        return {**meta, "fps": params.fps or CAPABILITIES.fps}, {"frames": frames_THWC}

    def commit(self, request: Request) -> None:
        request.session.chunk_index += 1

    def warmup_inputs(self) -> list[Inputs]:
        return [(DiffusionParams(session_id="warm-up", prompt="warm-up", one_shot=True), {})]


def _look_at_inputs(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the mean colour of the input images, uint8 [3], and the grey level of the second
    square.
    """
    images = [
        tensor
        for name, tensor in sorted(tensors.items())
        if name == "image" or name.startswith("image_")
    ]
    if not images:
        return torch.zeros(3, dtype=torch.uint8), 0
    means = torch.stack([image.float().mean((0, 1)) for image in images])
    return means.mean(0).round().to(torch.uint8), 10 * len(images) + 100 * ("mask" in tensors)


def _noise(key: str, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
    )
    return torch.randn(list(shape), generator=generator)


if TYPE_CHECKING:

    def _meets_protocol(model: NullImagePipeline) -> SupportsStepExecution[OneShotSession, _Image]:
        return model
