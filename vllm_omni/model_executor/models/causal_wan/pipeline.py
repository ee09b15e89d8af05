# SPDX-License-Identifier: Apache-2.0
"""Causal Wan 2.1, served chunk by chunk: encode, run a few denoise steps and one clean-context
pass, decode, commit.

    transformer(past, 0, cache)         for each chunk of the window, on `prompt_switch: recompute`
    transformer(given, 0, cache)        for latent frames from the client, such as a start image
    x = noise(seed, chunk, 0), or s noise + (1 - s) vae.encode(video)
    for i, t in enumerate(timesteps):
        v  = transformer(x, t, cache at step i)             denoise_step
        x0 = x - sigma_i v                                   step_scheduler
        x  = (1 - sigma) x0 + sigma noise(seed, chunk, i + 1)
    transformer(x0, 0, cache)                   the last denoise_step, unless noise-matched
    frames = vae.decode(x0)                                  post_decode
    advance the stream                                       commit

`CausalWan` is the model and does not depend on the engine; vLLM loads `CausalWanPipeline`, which
owns the model. Tested by tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.causal_wan.cache import ChunkCache
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import (
    CheckpointLayout,
    find_layout,
)
from vllm_omni.model_executor.models.causal_wan.checkpoint.weights import (
    adapter_target,
    load_transformer,
)
from vllm_omni.model_executor.models.causal_wan.config import (
    CausalWanConfig,
    CausalWanOptions,
    read_stream,
)
from vllm_omni.model_executor.models.causal_wan.request import read_chunk, read_shape
from vllm_omni.model_executor.models.causal_wan.sizes import StreamSizes, spare_frames
from vllm_omni.model_executor.models.causal_wan.state import (
    CausalWanChunk,
    ChunkInputs,
    PastChunk,
    StreamSession,
)
from vllm_omni.model_executor.models.causal_wan.transformer import CausalWanTransformer
from vllm_omni.model_executor.models.causal_wan.video_input import VideoEncoder
from vllm_omni.model_executor.models.wan.chunk_setup import (
    WanChunkSetup,
    build_autoencoders,
    build_networks,
    load_parts,
)
from vllm_omni.model_executor.models.wan.text_encoder.prompts import encode_prompt
from vllm_omni.model_executor.models.wan.transformer.chunk_transformer import ChunkItem
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import ChunkDecoder
from vllm_omni.model_executor.models.wan.vae.vae import CacheLayout
from vllm_omni.model_executor.schedules import ChunkNoise
from vllm_omni.model_executor.streaming.model import StreamingModel
from vllm_omni.model_executor.streaming.session import SessionShape
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint
from vllm_omni.outputs import RequestFailed

logger = logging.getLogger("vllm." + __name__)

Request = DiffusionRequest[StreamSession, CausalWanChunk]


class StreamSetup(WanChunkSetup[CausalWanConfig, CausalWanOptions]):
    """Arguments of `CausalWan`, from `hf_config(...)["causal_wan"]`."""

    read_stream = staticmethod(read_stream)

    layout: CheckpointLayout


class CausalWan(StreamingModel[StreamSession, CausalWanChunk]):
    """Implements `SupportsStepExecution` for the part of the model that this rank holds."""

    session_type = StreamSession

    config: CausalWanConfig
    """Architecture of the transformer."""
    options: CausalWanOptions
    """The model's serving options."""
    decoder: ChunkDecoder | None
    """Decoder from latents to frames. None on ranks that do not decode."""

    def __init__(self, setup: StreamSetup) -> None:
        super().__init__(setup)
        options, parallel = setup.options, setup.parallel
        self.schedule = options.text_schedule(setup.layout.origin)
        temporal = setup.omni.pipeline == "temporal"
        self._own_step = parallel.stage if temporal and not parallel.is_vae_stage else None
        own = (
            replace(parallel, stage=int(parallel.is_vae_stage), num_stages=1)
            if temporal
            else parallel
        )
        self.text_encoder, self.image_encoder, self.transformer, self.prompts = build_networks(
            setup, CausalWanTransformer, parallel=own
        )
        # Every rank that holds layers runs the VAE encoder, because it needs the noisy latents or
        # their timestep.
        encodes = options.video_input and not parallel.is_vae_stage
        self.vae, self.tiny_vae, self.decoder = build_autoencoders(setup, encodes=encodes)
        self.video = VideoEncoder(self.vae, options) if self.vae.has_encoder else None
        spare = spare_frames(options, self.plan, setup.omni, parallel)
        self.sizes = StreamSizes(
            self.config, options, self.plan, self.transformer, spare, self._own_step, setup.kv_dtype
        )

    def load_checkpoint(self, layout: CheckpointLayout) -> None:
        def load() -> None:
            if (limits := layout.origin.limits) is not None:
                logger.warning(
                    "%s is served without a part of its own sampler: %s", layout.release(), limits
                )
            load_transformer(self.transformer, layout.open_transformer(), self.config)

        load_parts(self, layout, load)

    def adapter_targets(self) -> dict[str, AdapterTarget]:
        return {"transformer": adapter_target(self.transformer, self.config)}

    # -- sessions ----------------------------------------------------------------------------------

    def read_shape(self, params: DiffusionParams) -> SessionShape:
        shape = read_shape(params, self.config, self.omni)
        if shape.source == "video" and not self.options.video_input:
            raise RequestFailed(
                "invalid_request", "this server makes video from text only (omni.model.video_input)"
            )
        self.vae.check_height(shape.height)
        recomputes = self.options.prompt_switch == "recompute" and not self.parallel.is_vae_stage
        return replace(shape, keeps_latents=recomputes)

    def window_nbytes(self, shape: SessionShape) -> int:
        return self.sizes.cache_nbytes(shape)

    def make_window(self, shape: SessionShape) -> ChunkCache:
        return self.sizes.new_cache(shape)

    def value_layout(self, shape: SessionShape) -> CacheLayout | None:
        encodes = self.video is not None and shape.source == "video"
        return self.vae.encoder_cache_layout(shape.height, shape.width) if encodes else None

    def own_bytes(self, shape: SessionShape) -> int:
        # Each chunk in flight has its own input video state, and may have its own prompt.
        after = self.omni.chunks_in_flight - 1
        total = after * self.transformer.cross_kv_nbytes
        if self.video is not None and shape.source == "video":
            total += (1 + after) * self.video.state_nbytes(shape.height, shape.width)
        if shape.keeps_latents:
            total += self.sizes.past_nbytes(shape)
        return total

    # -- one chunk ---------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        session, before = request.session, request.predecessor
        position = session.position() if before is None else before.work.position()
        inputs = read_chunk(request, session, position, self.options)
        frames = self.plan.frames(position.chunk_index)
        size = self.sizes.latent_shape(session.shape, len(frames))
        if self.text_encoder is None:
            request.state = CausalWanChunk.to_decode(
                frames,
                self.schedule,
                size,
                session.window,
                prompt=inputs.prompt,
                seed=inputs.seed,
                own=None,
                index=position.chunk_index,
            )
            request.num_steps = 1  # not used on a VAE stage
            return
        noise = ChunkNoise(tuple(size), inputs.seed, position.chunk_index, self.transformer.device)
        text, known = encode_prompt(
            request, inputs.prompt, position, self.text_encoder, self.transformer.device
        )
        latents, schedule, video = noise.draw(0), self.schedule, None
        if inputs.video is not None and self.video is not None:
            with request.timer.stage("video"):
                latents, schedule, video = self.video.noisy_latents(
                    inputs.video, position.video, latents
                )
        given = self._given(request, inputs)
        num_given = 0 if given is None else given.shape[1]
        if given is not None:
            latents[:, :num_given] = given
        after = frames[num_given:] or frames
        past = self._past_chunks(session, inputs.prompt)
        request.state = CausalWanChunk(
            frames=frames,
            schedule=self.chunk_schedule(request, schedule),
            latents=latents,
            noise=noise,
            rope=self._rope(after, session.shape),
            text=text,
            window=session.window.recompute(past[0].frames.start) if past else session.window,
            prompt=inputs.prompt,
            seed=inputs.seed,
            own=video,
            given=num_given,
            given_rope=self._rope(frames[:num_given], session.shape) if num_given else None,
            noise_scale=None if video is None else video.noise_scale,
            cross_kv=known,
            index=position.chunk_index,
            past=past,
        )
        has_clean_pass = self.options.cache != "noise_matched" and num_given < len(frames)
        request.clean_passes = (
            self.clean_passes(request.work, session.plan) if has_clean_pass else 0
        )
        request.num_steps = request.state.num_steps + request.clean_passes

    def batch_key(self, request: Request) -> Hashable:
        return super().batch_key(request), len(request.work.part(request.step))

    @torch.no_grad()
    def step_scheduler(self, batch: Sequence[Request], prediction: torch.Tensor) -> None:
        """Advance the latents as `StreamingModel.step_scheduler` does, but leave client-provided
        latent frames unchanged.
        """
        for request, flow in zip(batch, prediction, strict=True):
            chunk = request.work
            retained = chunk.latents[:, : chunk.given]
            if chunk.given and chunk.denoise_index(request.step) is not None:
                flow = torch.cat([torch.zeros_like(retained), flow], dim=1)
            super().step_scheduler([request], flow[None])
            if chunk.given:
                chunk.latents[:, : chunk.given] = retained

    @property
    def lag_steps(self) -> int:
        return 1

    @torch.no_grad()
    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        prediction = super().denoise_step(batch, hidden)
        for request in batch:
            self._end_step(request)
        return prediction

    def result_meta(self, request: Request) -> dict[str, Any]:
        scale = request.work.noise_scale
        return super().result_meta(request) | ({} if scale is None else {"noise_scale": scale})

    def pack_decode_state(self, request: Request) -> dict[str, Any]:
        return {"noise_scale": request.work.noise_scale}

    def unpack_decode_state(
        self, request: Request, latents: torch.Tensor, info: Mapping[str, Any]
    ) -> None:
        super().unpack_decode_state(request, latents, info)
        request.work.noise_scale = info["noise_scale"]

    def commit(self, request: Request) -> None:
        chunk = request.work
        if self._own_step is not None and chunk.index == 0 and not self.parallel.last_stage:
            # At every step, later chunks attend to the K/V that the first chunk wrote in its last
            # step.
            self.transformer(
                [self._batch_item(request, chunk.schedule.num_steps - 1)], None, kv_only=True
            )
        super().commit(request)

    def warmup_inputs(self) -> list[Inputs]:
        """Return the inputs for a first and a later chunk of the largest size. The warm-up needs
        both chunks, because a later chunk decodes more frames than the first.
        """
        source = "video" if self.options.video_input else "text"
        params = DiffusionParams(session_id="warm-up", prompt="warm-up", options={"source": source})
        inputs: list[Inputs] = []
        for index, request in enumerate((params, msgspec.structs.replace(params, prompt=None))):
            shape = (len(self.plan.pixel_frames(index)), self.omni.height, self.omni.width, 3)
            video = (
                {"video": torch.zeros(shape, dtype=torch.uint8)} if self.options.video_input else {}
            )
            inputs.append((request, video))
        return inputs

    # -- helpers -----------------------------------------------------------------------------------

    def _past_chunks(self, session: StreamSession, prompt: str) -> tuple[PastChunk, ...]:
        """Return the earlier chunks whose K/V must be recomputed for a new `prompt`."""
        if prompt == session.prompt:
            return ()
        past = session.past_latents()
        return tuple(
            PastChunk(frames, latents, self._rope(frames, session.shape))
            for frames, latents in past
        )

    def _given(self, request: Request, inputs: ChunkInputs) -> torch.Tensor | None:
        """If the client provides the chunk's first latent frames, return them, [16, G, h, w] on the
        device; otherwise return None.
        """
        if inputs.latents is not None:
            return inputs.latents.to(self.transformer.device)
        if inputs.image is None:
            return None
        assert self.video is not None, "read_chunk lets no image through that cannot be encoded"
        shape = request.session.shape
        with request.timer.stage("image"):
            return self.video.image(
                inputs.image, shape.height, shape.width, self.transformer.device
            )

    def _rope(self, frames: range, shape: SessionShape) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transformer.rope(frames, self.sizes.latent_shape(shape, len(frames)))

    def start_step(self, request: Request) -> None:
        """Before a chunk's first forward pass, compute the prompt's K/V. This is collective under
        tensor parallelism.

        Also place the sink frames before each forward pass over a new range of frames.
        With per-step sinks, they are placed before every denoise step.
        """
        chunk = request.work
        self.prompts.complete_chunk(chunk)
        if request.step < len(chunk.past):
            chunk.window.open(chunk.past[request.step].frames)
        elif chunk.window.has_sinks_per_step or request.step == len(chunk.past):
            chunk.window.open(chunk.frames, request.step)

    def _end_step(self, request: Request) -> None:
        """Store the sink frames that a forward pass has written, and decide which sink frames to
        replace. With per-step sinks, this happens after every denoise step, otherwise after the
        chunk's last forward pass. Ranks that shard the heads make the same decision.
        """
        chunk, step = request.work, request.step
        if chunk.window.has_sinks_per_step:
            chunk.window.retain_sinks(chunk.frames, step)
        elif step + 1 < request.num_steps:
            if step < len(chunk.past):
                chunk.window.keep_sinks(chunk.past[step].frames)
            return
        sums = chunk.window.resemblances(chunk.frames.stop, step)
        if sums is not None:
            if self.parallel.size > 1:
                dist.all_reduce(sums, group=self.parallel.group)
            chunk.window.decide(chunk.frames.stop, sums, step)

    def items(self, request: Request) -> list[ChunkItem]:
        return [self._batch_item(request)]

    def _batch_item(self, request: Request, step: int | None = None) -> ChunkItem:
        """Return a chunk's inputs for the forward pass of denoise step `step`. Default: the chunk's
        next forward pass.
        """
        chunk = request.work
        assert chunk.cross_kv is not None
        part, past = chunk.part(request.step), chunk.past[request.step : request.step + 1]
        rope = (
            past[0].rope
            if past
            else chunk.given_rope
            if chunk.is_given(request.step)
            else chunk.rope
        )
        assert rope is not None
        step, clean = (
            chunk.denoise_index(request.step) if step is None else step,
            chunk.schedule.num_steps,
        )
        return ChunkItem(
            latents=past[0].latents if past else chunk.latents_of(part),
            timestep=0.0 if step is None else chunk.schedule.timesteps[step],
            frames=part,
            rope=rope,
            cross_kv=chunk.cross_kv,
            window=chunk.window.at(clean if step is None else step),
        )


class CausalWanPipeline(CheckpointPipeline[CheckpointLayout]):
    """Owns a `CausalWan`. vLLM's model loader builds this class and loads its weights."""

    def find_layout(self, path: Path) -> CheckpointLayout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[CheckpointLayout]) -> CausalWan:
        return CausalWan(StreamSetup.served(served.hf_config.causal_wan, served))
