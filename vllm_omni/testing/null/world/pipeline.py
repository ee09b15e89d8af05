# SPDX-License-Identifier: Apache-2.0
"""`NullWorldPipeline`: a world model without a network, to test and measure code around a model.

`NullWorldPipeline` takes almost no time but behaves like a causal world model. The latents of a
chunk depend on prompt, seed, camera, actions and all earlier chunks of the session. The layers can
be split over pipeline stages, and each frame identifies the chunk that it belongs to.
`DiffusionParams.options` can delay a chunk or make it fail (`NullOptions`).

All pixels of frame n of a session have the value n % 256, except for pixel (0, 0) and the squares
that show actions (`marks.py`). Pixel (0, 0) is (chunk % 256, signature % 256, 0), where the
signature is the sum of the chunk's latents. `omni.model.actions` sets the controls.
"""

import hashlib
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_omni.actions import ActionFrames, read_actions
from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.inputs import DiffusionParams, Text, refuse_unused
from vllm_omni.model_executor.interfaces import (
    DiffusionRequest,
    Inputs,
    SessionState,
    SupportsStepExecution,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.vllm_model import StepPipeline
from vllm_omni.outputs import RequestFailed, empty_result
from vllm_omni.seeds import Seed
from vllm_omni.tensors.saved import ChunkIndex, SavedTensors, read_scalars
from vllm_omni.testing.null.world import marks
from vllm_omni.testing.null.world.options import NullWorldOptions

NUM_LAYERS = 4
LATENT_CHANNELS = 4
FIRST_CHUNK_FRAMES, CHUNK_FRAMES = 9, 12
CHUNK_LATENTS = 3
FRAMES_PER_LATENT = 4


class NullFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Artificial delays and failures of a request."""

    step_ms: float = 0.0
    """Duration of each denoise step in milliseconds."""
    prepare_ms: float = 0.0
    """Duration of `prepare_encode` in milliseconds."""
    decode_ms: float = 0.0
    """Duration of the decode in milliseconds."""
    fail_in: str | None = None
    """Phase that raises an error: `prepare`, `denoise` or `decode`."""
    fail_at: int = 0
    """Index of the denoise step that fails if `fail_in` is `denoise`."""
    nan_at: int | None = None
    """Index of the step after which the latents are NaN, or None if no step makes them NaN."""
    clean_pass: bool = False
    """Whether the last step is a clean-context pass, which does not change the latents."""


class NullOptions(NullFaults, frozen=True, forbid_unknown_fields=True):
    """Contents of `DiffusionParams.options` for one chunk."""

    steps: int = 5
    """Number of denoise steps of the chunk."""


class NullScalars(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values returned by `NullSession.scalars`, as read from a snapshot file."""

    chunk_index: ChunkIndex
    """Index of the next chunk."""
    prompt: Text
    """Prompt of the session's last chunk."""
    seed: Seed
    """Seed of the session."""


class NullSession(SessionState):
    """State of a null-world session.

    Later chunks depend on `memory_CHW`, the fp32 sum of all committed latents.
    """

    def __init__(
        self,
        session_id: str,
        params: DiffusionParams,
        height: int,
        width: int,
        device: torch.device,
    ) -> None:
        super().__init__(session_id)
        self.height, self.width = height, width
        self.prompt = params.prompt or ""
        self.seed = params.seed or 0
        self.memory_CHW = torch.zeros(LATENT_CHANNELS, height // 8, width // 8, device=device)

    @property
    def nbytes(self) -> int:
        return self.memory_CHW.numel() * self.memory_CHW.element_size()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"memory": self.memory_CHW}

    def scalars(self) -> dict[str, Any]:
        return {"chunk_index": self.chunk_index, "prompt": self.prompt, "seed": self.seed}

    def start_params(self) -> DiffusionParams:
        return DiffusionParams(
            session_id=self.session_id,
            prompt=self.prompt,
            seed=self.seed,
            height=self.height,
            width=self.width,
        )

    def restore(self, scalars: Mapping[str, Any], saved: SavedTensors) -> None:
        retained = read_scalars(scalars, NullScalars)
        self.chunk_index, self.prompt, self.seed = (
            retained.chunk_index,
            retained.prompt,
            retained.seed,
        )
        saved.fill(self.tensors())

    def fork(self, session_id: str) -> "NullSession":
        params = DiffusionParams(session_id=session_id, prompt=self.prompt, seed=self.seed)
        copy = NullSession(session_id, params, self.height, self.width, self.memory_CHW.device)
        copy.memory_CHW.copy_(self.memory_CHW)
        copy.chunk_index = self.chunk_index
        return copy

    def to(self, device: torch.device | str) -> None:
        self.memory_CHW = self.memory_CHW.to(device)


@dataclass
class _Chunk:
    """Working set of one null-world chunk."""

    latents_CHW: torch.Tensor
    """Current latents of the chunk."""
    options: NullOptions
    """Options that the chunk's request sets."""
    prompt: str
    """Prompt of the session after the chunk."""
    rows: ActionFrames | None
    """Controls for each latent frame, or None if the request has no controls."""


Request = DiffusionRequest[NullSession, _Chunk]


class NullWorldPipeline(StepPipeline):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        self.space = parse_options(NullWorldOptions, self.omni.model, "omni.model").actions
        self.gain_N = nn.Parameter(torch.ones(NUM_LAYERS), requires_grad=False)
        parallel = ParallelContext.from_vllm(
            vae_stage=self.omni.vae_stage, partition=self.omni.partition
        )
        self.is_first = parallel.first_stage
        self.layers = parallel.layers(NUM_LAYERS)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = dict(weights)
        if set(loaded) != {"gain"} or loaded["gain"].shape != self.gain_N.shape:
            raise ValueError(
                f"expected one tensor 'gain' of shape ({NUM_LAYERS},), got {sorted(loaded)[:3]}"
            )
        self.gain_N.data.copy_(loaded["gain"])
        return {"gain_N"}

    def _size(self, params: DiffusionParams) -> tuple[int, int]:
        height, width = params.height or self.omni.height, params.width or self.omni.width
        if height % 8 or width % 8 or height * width > self.omni.max_area:
            raise RequestFailed(
                "unsupported_size",
                f"{width}x{height} arrived; width and height must be multiples of 8 with at most "
                f"{self.omni.max_area} pixels",
            )
        return height, width

    def session_nbytes(self, params: DiffusionParams) -> int:
        height, width = self._size(params)
        return LATENT_CHANNELS * (height // 8) * (width // 8) * 4

    def new_session(self, params: DiffusionParams) -> NullSession:
        if params.prompt is None and self.space.prompt == "required":
            raise RequestFailed("invalid_request", "a session's first chunk needs a prompt")
        return NullSession(params.session_id, params, *self._size(params), self.gain_N.device)

    def prepare_encode(self, request: Request) -> None:
        session = request.session
        refuse_unused(request.params, ("prompt", "seed", "height", "width", "actions"))
        try:
            options = parse_options(NullOptions, request.params.options, "options")
        except ValueError as error:
            raise RequestFailed("invalid_request", str(error)) from error
        time.sleep(options.prepare_ms / 1e3)
        if options.fail_in == "prepare":
            raise RuntimeError("injected failure")
        poses = request.tensors.get("poses")
        if poses is not None and not bool(torch.isfinite(poses).all()):
            raise RequestFailed("non_finite_pose", "poses must be finite")
        if request.params.prompt and self.space.prompt == "none":
            raise RequestFailed(
                "invalid_request", f"this model takes no prompt; it takes {self.space.takes()}"
            )
        rows = read_actions(self.space, request.params.actions, request.tensors, CHUNK_LATENTS)
        prompt = request.params.prompt if request.params.prompt is not None else session.prompt
        key = f"{prompt}|{session.seed}|{session.chunk_index}|{0 if poses is None else float(poses.double().sum())}"  # noqa: E501
        if rows is not None and not marks.is_idle(rows):
            key += f"|{rows.buttons_NB.tolist()}{rows.axes_NA.tolist()}{rows.scroll_N.tolist()}"
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
        )
        noise = torch.randn(session.memory_CHW.shape, generator=generator)
        request.state = _Chunk(noise.to(session.memory_CHW.device), options, prompt, rows)
        request.num_steps = (
            -(-options.steps // 2) if "fewer_steps" in request.degradations else options.steps
        )
        request.clean_passes = int(options.clean_pass)

    def batch_key(self, request: Request) -> Hashable:
        return request.work.latents_CHW.shape

    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        for request in batch:
            options = request.work.options
            if self.is_first:
                time.sleep(options.step_ms / 1e3)
            if options.fail_in == "denoise" and request.step == options.fail_at:
                raise RuntimeError("injected failure")
        x_BCHW = (
            torch.stack([request.work.latents_CHW for request in batch])
            if hidden is None
            else hidden
        )
        memory_BCHW = torch.stack([request.session.memory_CHW for request in batch])
        for layer in self.layers:
            x_BCHW = torch.tanh(x_BCHW * self.gain_N[layer] + 0.1 * memory_BCHW + 0.01 * layer)
        return x_BCHW

    def step_scheduler(self, batch: Sequence[Request], prediction: torch.Tensor) -> None:
        for request, x0_CHW in zip(batch, prediction, strict=True):
            chunk = request.work
            if request.step >= request.num_steps - request.clean_passes:
                continue
            chunk.latents_CHW = chunk.latents_CHW + (x0_CHW - chunk.latents_CHW) / (
                request.num_steps - request.step
            )
            if chunk.options.nan_at == request.step:
                chunk.latents_CHW = chunk.latents_CHW * float("nan")

    def latents(self, request: Request) -> torch.Tensor:
        return request.work.latents_CHW

    def set_latents(self, request: Request, latents: torch.Tensor) -> None:
        request.work.latents_CHW = latents.clone()

    def post_decode(self, request: Request) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        chunk, session = request.work, request.session
        time.sleep(chunk.options.decode_ms / 1e3)
        if chunk.options.fail_in == "decode":
            raise RuntimeError("injected failure")
        index = session.chunk_index
        first = 0 if index == 0 else FIRST_CHUNK_FRAMES + CHUNK_FRAMES * (index - 1)
        count = FIRST_CHUNK_FRAMES if index == 0 else CHUNK_FRAMES
        meta = {
            "first_frame": first,
            "num_frames": count,
            "height": session.height,
            "width": session.width,
        }
        if request.params.output == "latents":
            return meta, {"latents": chunk.latents_CHW}
        signature = round(float(chunk.latents_CHW.double().sum()) * 1000)
        frames_THWC = empty_result((count, session.height, session.width, 3), torch.uint8)
        for number in range(count):
            frames_THWC[number].fill_((first + number) % 256)
        if chunk.rows is not None and not marks.is_idle(chunk.rows):
            first_latent = FRAMES_PER_LATENT if index else 1
            repeats = [first_latent, *[FRAMES_PER_LATENT] * (CHUNK_LATENTS - 1)]
            marks.draw(frames_THWC, self.space, chunk.rows.repeated(repeats))
        frames_THWC[:, 0, 0] = torch.tensor([index % 256, signature % 256, 0], dtype=torch.uint8)
        alongside = {"latents": chunk.latents_CHW} if request.params.output == "both" else {}
        return meta, {"frames": frames_THWC, **alongside}

    def pack_decode_state(self, request: Request) -> dict[str, Any]:
        return {}

    def unpack_decode_state(
        self, request: Request, latents: torch.Tensor, info: Mapping[str, Any]
    ) -> None:
        request.work.latents_CHW = latents

    def commit(self, request: Request) -> None:
        session = request.session
        session.memory_CHW = session.memory_CHW + request.work.latents_CHW
        session.prompt = request.work.prompt
        session.chunk_index += 1

    def warmup_inputs(self) -> list[Inputs]:
        prompt = None if self.space.prompt == "none" else "warm-up"
        return [(DiffusionParams(session_id="warm-up", prompt=prompt), {})]


if TYPE_CHECKING:

    def _meets_protocol(model: NullWorldPipeline) -> SupportsStepExecution[NullSession, _Chunk]:
        return model
