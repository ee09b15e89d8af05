# SPDX-License-Identifier: Apache-2.0
"""Waypoint served frame by frame: encode, four Euler steps, one pass at noise level 0, decode, commit.

    a start image: its latent is a session's first frame               prepare_encode
    transformer(latent, 0, controls): its K/V stay                     the first denoise_step
    x = noise(seed, chunk)
    for i, s in enumerate(sigmas[:-1]):
        v = transformer(x, s, controls)                                denoise_step
        x = x + (sigmas[i + 1] - s) v                                  step_scheduler
    transformer(x, 0, controls): only its K/V matter                   the last denoise_step
    frames = codec.decode(x)                                           post_decode
    the session moves on                                               commit

`Waypoint` is the algorithm and needs no engine; `WaypointPipeline` is the same thing as vLLM loads it.
Held by tests/model_executor/models/waypoint/test_waypoint_pipeline.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs, SupportsStepExecution
from vllm_omni.model_executor.models.wan.prompts import SharedPrompts
from vllm_omni.model_executor.models.wan.text_encoder import AwaitedText, TextEncoder, text_encoder_of
from vllm_omni.model_executor.models.waypoint.autoencoders import make_codec
from vllm_omni.model_executor.models.waypoint.checkpoint import CheckpointLayout, find_layout, load_transformer
from vllm_omni.model_executor.models.waypoint.config import (
    DEFAULT_PROMPT,
    PROMPT_ROWS,
    WaypointConfig,
    WaypointStream,
    action_space,
    control_vectors,
    read_stream,
)
from vllm_omni.model_executor.models.waypoint.state import (
    Chunk,
    FrameRow,
    LatentFrame,
    WaypointSession,
    frame_rings,
)
from vllm_omni.model_executor.models.waypoint.transformer import WaypointTransformer
from vllm_omni.model_executor.noise import ChunkNoise
from vllm_omni.model_executor.schedules import EulerSchedule
from vllm_omni.model_executor.streaming.model import StreamingModel
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.request import read_latent_rows, read_played, read_size
from vllm_omni.model_executor.streaming.session import SessionShape, StateLayouts
from vllm_omni.model_executor.streaming.setup import StreamingSetup
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint

Request = DiffusionRequest[WaypointSession, Chunk]


@dataclass(frozen=True, kw_only=True)
class WaypointSetup(StreamingSetup[WaypointConfig, StreamingOptions, CheckpointLayout]):
    """codec: the autoencoder's arguments. text_config: `UMT5Config` values, {} without prompts."""

    read_stream = staticmethod(read_stream)

    codec: Mapping[str, Any]
    text_config: Mapping[str, Any]

    @classmethod
    def own_fields(cls, checkpoint: Mapping[str, Any], stream: WaypointStream, omni: OmniConfig) -> dict[str, Any]:
        return {"codec": checkpoint["codec"], "text_config": checkpoint["umt5"]}


class Waypoint(StreamingModel[SessionShape, WaypointSession, Chunk]):
    """Implements `SupportsStepExecution` for the part of the model that this rank holds."""

    config: WaypointConfig

    def __init__(self, setup: WaypointSetup) -> None:
        super().__init__()
        self.build(setup)

    def build(self, setup: WaypointSetup) -> None:
        """Create the sub-modules, in torch's default device; parameters are empty until loaded."""
        config, options, parallel = setup.config, setup.options, setup.parallel
        self.config, self.options, self.omni, self.parallel = config, options, setup.omni, parallel
        self.kv_dtype, self.plan = setup.kv_dtype, setup.plan
        self.action_space = action_space(config)
        self.schedule = EulerSchedule(config.scheduler_sigmas, setup.dtype)
        with default_dtype(setup.dtype):
            self.transformer = WaypointTransformer(
                config,
                parallel,
                compiled=setup.compiled,
                cuda_graphs=setup.cuda_graphs,
                quantization=setup.quantization,
            )
        self.prompts = SharedPrompts(self._prompt_kv)
        self.codec = make_codec(config, setup.codec, options.vae_torch_dtype(setup.dtype))
        self.decoder = self.codec if parallel.decodes else None
        self.text_encoder: TextEncoder | AwaitedText | None = None
        if setup.text_config:
            self.text_encoder = text_encoder_of(
                parallel,
                setup.text_config,
                setup.layout.text_encoder,
                max_tokens=PROMPT_ROWS,
                device=options.text_encoder_device,
                dtype=setup.dtype,
            )

    def load_checkpoint(self, layout: CheckpointLayout) -> None:
        """Fill every parameter this rank has, strictly. Raises ValueError."""
        layout.require(self.config)
        load_transformer(self.transformer, layout.open_network())
        layout.load_codec(self.codec)
        if self.text_encoder is not None and layout.text_encoder is not None:
            self.text_encoder.load(layout.text_encoder)
        self.prompts.forget()

    # -- sessions ------------------------------------------------------------------------------------------------------

    def read_shape(self, params: DiffusionParams) -> SessionShape:
        return SessionShape(*read_size(params, self.config, self.omni), params.output)

    def window_nbytes(self, shape: SessionShape) -> int:
        return frame_rings(**self._window_sizes(), device="meta").nbytes

    def _window_sizes(self) -> dict[str, Any]:
        network = self.transformer
        return {
            "config": self.config,
            "layers": network.layer_range,
            "num_heads": network.num_cache_heads,
            "dtype": network.dtype,
            "storage": self.kv_dtype,
        }

    def make_session(self, session_id: str, shape: SessionShape, reserved_bytes: int) -> WaypointSession:
        network = self.transformer
        rings = frame_rings(**self._window_sizes(), device=network.device, rings=network.rings)
        decodes = self.decoder is not None and shape.output != "latents"
        layouts = StateLayouts[None](self.codec.decoder_layout() if decodes else None, None)
        return WaypointSession(session_id, shape, self.plan, rings, layouts, reserved_bytes)

    # -- one chunk -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        session = request.session
        inputs = read_played(request, session, self.action_space)
        rows = read_latent_rows(request.params, request.tensors, self.action_space, 1)
        prompt = inputs.prompt or (DEFAULT_PROMPT if self.config.prompted else "")
        start = session.window.committed_frames
        frames = range(start, start + 1 + (inputs.image is not None))
        channels, *cells = self.config.latent_shape
        size = (channels, 1, *cells)
        given: dict[str, Any] = {"prompt": prompt, "seed": inputs.seed, "controls": control_vectors(rows)[0]}
        if self.parallel.is_vae_stage:
            request.state = Chunk.to_decode(frames, self.schedule, size, session.window, own=None, **given)
            request.num_steps = 1  # the ranks with layers know
            return
        image = None
        if inputs.image is not None:
            with request.timer.stage("image"):
                image = self.codec.encode_image(inputs.image)
        known = prompt == session.prompt and session.cross_kv is not None
        text = None
        if self.text_encoder is not None and not known:
            with request.timer.stage("text"):
                text = self.text_encoder.encode(prompt, self.transformer.device)
        noise = ChunkNoise(size, inputs.seed, session.chunk_index, self.transformer.device)
        parts = [LatentFrame(self.transformer.rope(frame), session.window.place(frame)) for frame in frames]
        request.state = Chunk(
            frames=frames,
            schedule=self.schedule,
            latents=noise.draw(0),
            noise=noise,
            rope=parts[-1].rope,
            text=text,
            window=session.window,
            own=None,
            cross_kv=session.cross_kv if known else None,
            parts=parts,
            image=image,
            **given,
        )
        request.num_steps = len(frames) + self.schedule.num_steps
        request.clean_passes = 1

    def texts(self, request: Request) -> list[torch.Tensor]:
        text = request.work.text
        return [] if text is None else [text]

    @torch.no_grad()
    def denoise_step(self, batch: Sequence[Request], hidden: torch.Tensor | None = None) -> torch.Tensor:
        for request in batch:
            if request.work.terms is None:
                self._begin_chunk(request.work)
        prediction: torch.Tensor = self.transformer([self._row(request) for request in batch], hidden)
        return prediction.unsqueeze(2) if self.parallel.last_stage else prediction

    @torch.no_grad()
    def post_decode(self, request: Request) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        session, chunk = request.session, request.work
        meta, shape = self.result_meta(request), session.shape
        if shape.output == "latents":
            return meta, {"latents": chunk.latents}
        chunk.decoded_from = session.decoder_cache
        size = (shape.height, shape.width)
        frames, chunk.decoder_cache = self.codec.decode_frames(chunk.latents, size, session.decoder_cache)
        return meta, {"frames": frames} | chunk.latents_beside(shape)

    def warmup_inputs(self) -> list[Inputs]:
        """A chunk with an image and one without: every kind of forward, and a stream's first decode and a later one."""
        image = torch.zeros(self.omni.height, self.omni.width, 3, dtype=torch.uint8)
        params = DiffusionParams(session_id="warm-up")
        return [(params, {"image": image}), (params, {})]

    # -- parts of the above --------------------------------------------------------------------------------------------

    def _prompt_kv(self, text_SE: torch.Tensor) -> torch.Tensor:
        """K/V of an encoded prompt (collective under tensor parallelism)."""
        padded = functional.pad(text_SE, (0, 0, 0, PROMPT_ROWS - len(text_SE)))
        return self.transformer.cross_attention_kv(padded)

    def _begin_chunk(self, chunk: Chunk) -> None:
        """Shared by a chunk's forwards: its controls' and its prompt's part (collective there)."""
        chunk.terms = self.transformer.controls(chunk.controls)
        if chunk.cross_kv is None and chunk.text is not None:
            chunk.cross_kv = self.prompts.get(chunk.prompt, chunk.text)

    def _row(self, request: Request) -> FrameRow:
        chunk = request.work
        part, step = chunk.part(request.step), chunk.denoise_index(request.step)
        assert chunk.terms is not None
        return FrameRow(
            latents=chunk.latents_at(request.step),
            sigma=0.0 if step is None else self.schedule.sigmas[step],
            rope=part.rope,
            control=chunk.terms,
            window=chunk.window,
            place=part.place,
            prompt_kv=chunk.cross_kv,
        )


class WaypointPipeline(CheckpointPipeline[CheckpointLayout], Waypoint):
    """`Waypoint` as vLLM's model loader builds and fills it."""

    def find_layout(self, path: Path) -> CheckpointLayout:
        return find_layout(path)

    def build_served(self, served: ServedCheckpoint[CheckpointLayout]) -> None:
        self.build(WaypointSetup.served(served.hf_config.waypoint, served))


if TYPE_CHECKING:

    def _keeps_the_contract(model: Waypoint) -> SupportsStepExecution[WaypointSession, Chunk]:
        return model
