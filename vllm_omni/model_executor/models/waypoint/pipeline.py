# SPDX-License-Identifier: Apache-2.0
"""The Waypoint pipeline: one latent frame per chunk, with Euler steps and a clean-context pass.

    z = codec.encode_image(image)                        prepare_encode, with a start image
    transformer(z, 0, controls)  # writes K/V            denoise_step, with a start image
    x = noise(seed, chunk)                               prepare_encode
    for i, s in enumerate(sigmas[:-1]):
        v = transformer(x, s, controls)                  denoise_step
        x = x + (sigmas[i + 1] - s) v                    step_scheduler
    transformer(x, 0, controls)  # writes K/V            denoise_step, the clean-context pass
    frames = codec.decode(x)                             post_decode
    advance the session                                  commit

`Waypoint` is the model and does not depend on the engine; vLLM loads `WaypointPipeline`, which owns
the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs
from vllm_omni.model_executor.models.wan.text_encoder.encoder import text_encoder_of
from vllm_omni.model_executor.models.wan.text_encoder.prompts import SharedPrompts
from vllm_omni.model_executor.models.waypoint.autoencoders import make_codec
from vllm_omni.model_executor.models.waypoint.checkpoint import (
    CheckpointLayout,
    find_layout,
    load_transformer,
)
from vllm_omni.model_executor.models.waypoint.config import (
    DEFAULT_PROMPT,
    PROMPT_ROWS,
    WaypointConfig,
    WaypointOptions,
    WaypointStream,
    action_space,
    control_vectors,
    read_stream,
)
from vllm_omni.model_executor.models.waypoint.state import (
    FrameRings,
    WaypointChunk,
    WaypointSession,
)
from vllm_omni.model_executor.models.waypoint.transformer import FrameItem, WaypointTransformer
from vllm_omni.model_executor.schedules import ChunkNoise, EulerSchedule
from vllm_omni.model_executor.streaming.model import StreamingModel, build_transformer
from vllm_omni.model_executor.streaming.request import read_latent_actions, read_played
from vllm_omni.model_executor.streaming.session import SessionShape
from vllm_omni.model_executor.streaming.setup import StreamingSetup
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint

Request = DiffusionRequest[WaypointSession, WaypointChunk]


@dataclass(frozen=True, kw_only=True)
class WaypointSetup(StreamingSetup[WaypointConfig, WaypointOptions]):
    """Resolved and validated constructor arguments of `Waypoint`."""

    read_stream = staticmethod(read_stream)

    layout: CheckpointLayout
    """Paths of the checkpoint's components."""
    codec: Mapping[str, Any]
    """Autoencoder arguments that override the released ones."""
    text_config: Mapping[str, Any]
    """`UMT5Config` values of the text encoder. The mapping is empty if the model takes no prompts.
    """

    @classmethod
    def own_fields(
        cls, checkpoint: Mapping[str, Any], stream: WaypointStream, omni: OmniConfig
    ) -> dict[str, Any]:
        return {"codec": checkpoint["codec"], "text_config": checkpoint["umt5"]}


class Waypoint(StreamingModel[WaypointSession, WaypointChunk]):
    """Implements `SupportsStepExecution` for the part of the model that this rank holds."""

    session_type = WaypointSession

    config: WaypointConfig

    def __init__(self, setup: WaypointSetup) -> None:
        super().__init__(setup)
        self.transformer = build_transformer(setup, WaypointTransformer)
        self.action_space = action_space(setup.config)
        self.schedule = EulerSchedule(setup.config.scheduler_sigmas, setup.dtype)
        self.prompts = SharedPrompts(self._prompt_kv)
        self.codec = make_codec(
            setup.config, setup.codec, setup.options.vae_torch_dtype(setup.dtype)
        )
        self.decoder = self.codec if setup.parallel.decodes else None
        self.text_encoder = text_encoder_of(
            setup.parallel,
            setup.text_config,
            setup.layout.text_encoder,
            max_tokens=PROMPT_ROWS,
            device=setup.options.text_encoder_device,
            dtype=setup.dtype,
            cuda_graphs=setup.text_graphs,
        )

    def load_checkpoint(self, layout: CheckpointLayout) -> None:
        """Load all parameters of this rank strictly. Raises ValueError if the checkpoint does not
        match.
        """
        layout.require(self.config)
        load_transformer(self.transformer, layout.open_network())
        layout.load_codec(self.codec)
        if self.text_encoder is not None and layout.text_encoder is not None:
            self.text_encoder.load(layout.text_encoder)
        self.prompts.clear_prompt()

    # -- sessions ----------------------------------------------------------------------------------

    def window_nbytes(self, shape: SessionShape) -> int:
        return self._rings(device="meta").nbytes

    def make_window(self, shape: SessionShape) -> FrameRings:
        return self._rings(device=self.transformer.device, rings=self.transformer.rings)

    def _rings(self, **slot: Any) -> FrameRings:
        network = self.transformer
        sizes = {
            "num_heads": network.num_cache_heads,
            "dtype": network.dtype,
            "storage": self.kv_dtype,
        }
        return FrameRings(self.config, network.layer_range, **sizes, **slot)

    # -- one chunk ---------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        session = request.session
        inputs = read_played(request, session, self.action_space)
        actions = read_latent_actions(request.params, request.tensors, self.action_space, 1)
        prompt = inputs.prompt or (DEFAULT_PROMPT if self.config.prompted else "")
        start = session.window.committed_frames
        frames = range(start, start + 1 + (inputs.image is not None))
        channels, *cells = self.config.latent_shape
        size = (channels, 1, *cells)
        given: dict[str, Any] = {
            "prompt": prompt,
            "seed": inputs.seed,
            "controls": control_vectors(actions)[0],
        }
        if self.parallel.is_vae_stage:
            request.state = WaypointChunk.to_decode(
                frames, self.schedule, size, session.window, own=None, **given
            )
            request.num_steps = 1  # not used on a VAE stage
            return
        image = None
        if inputs.image is not None:
            with request.timer.stage("image"):
                image = self.codec.encode_image(to_device(inputs.image, self.transformer.device))
        known = prompt == session.prompt and session.cross_kv is not None
        text = None
        if self.text_encoder is not None and not known:
            with request.timer.stage("text"):
                text = self.text_encoder.encode(prompt, self.transformer.device)
        noise = ChunkNoise(size, inputs.seed, session.chunk_index, self.transformer.device)
        ropes = [self.transformer.rope(frame) for frame in frames]
        request.state = WaypointChunk(
            frames=frames,
            schedule=self.schedule,
            latents=noise.draw(0),
            noise=noise,
            rope=ropes[-1],
            ropes=ropes,
            slots=[session.window.frame_slot(frame) for frame in frames],
            text=text,
            window=session.window,
            own=None,
            cross_kv=session.cross_kv if known else None,
            image=image,
            **given,
        )
        request.num_steps = len(frames) + self.schedule.num_steps
        request.clean_passes = 1

    @torch.no_grad()
    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        actions: list[FrameItem] = []
        for request in batch:
            self.start_step(request)
            actions += self.items(request)
        prediction: torch.Tensor = self.transformer(actions, hidden)
        return prediction.unsqueeze(2) if self.parallel.last_stage else prediction

    def warmup_inputs(self) -> list[Inputs]:
        """Return the inputs of a chunk with a start image and of a chunk without one. Together,
        they run every kind of forward pass and both kinds of decode: the first decode of a stream
        and a later one.
        """
        image = torch.zeros(self.omni.height, self.omni.width, 3, dtype=torch.uint8)
        params = DiffusionParams(session_id="warm-up")
        return [(params, {"image": image}), (params, {})]

    # -- helpers -------------------------------------------------------------------------

    def _prompt_kv(self, text_SE: torch.Tensor) -> torch.Tensor:
        """Return the cross-attention K/V of an encoded prompt. With tensor parallelism, this is a
        collective operation.
        """
        padded = functional.pad(text_SE, (0, 0, 0, PROMPT_ROWS - len(text_SE)))
        return self.transformer.cross_attention_kv(padded)

    def start_step(self, request: Request) -> None:
        """Compute the terms for the controls and the prompt, which all forward passes of a chunk
        share. With tensor parallelism, this is a collective operation.
        """
        chunk = request.work
        if chunk.terms is not None:
            return
        chunk.terms = self.transformer.controls(chunk.controls)
        if chunk.cross_kv is None and chunk.text is not None:
            chunk.cross_kv = self.prompts.get(chunk.prompt, chunk.text)

    def items(self, request: Request) -> list[FrameItem]:
        chunk = request.work
        frame, step = chunk.frame_index(request.step), chunk.denoise_index(request.step)
        assert chunk.terms is not None
        row = FrameItem(
            latents=chunk.latents_at(request.step),
            sigma=0.0 if step is None else self.schedule.sigmas[step],
            rope=chunk.ropes[frame],
            control=chunk.terms,
            window=chunk.window,
            slot=chunk.slots[frame],
            prompt_kv=chunk.cross_kv,
        )
        return [row]


class WaypointPipeline(CheckpointPipeline[CheckpointLayout]):
    """Owns a `Waypoint`. vLLM's model loader builds this class and loads its weights."""

    def find_layout(self, path: Path) -> CheckpointLayout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[CheckpointLayout]) -> Waypoint:
        return Waypoint(WaypointSetup.served(served.hf_config.waypoint, served))
