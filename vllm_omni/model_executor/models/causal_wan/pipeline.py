# SPDX-License-Identifier: Apache-2.0
"""Causal Wan 2.1 served chunk by chunk: encode, a few denoise steps, one clean pass, decode, commit.

    x = noise(seed, chunk, 0), or s noise + (1 - s) vae.encode(video)
    for i, t in enumerate(timesteps):
        v  = transformer(x, t, cache at step i)             denoise_step
        x0 = x - sigma_i v                                   step_scheduler
        x  = (1 - sigma) x0 + sigma noise(seed, chunk, i + 1)
    transformer(x0, 0, cache): only its K/V matter           the last denoise_step, unless noise-matched
    frames = vae.decode(x0)                                  post_decode
    the stream moves on                                      commit

`CausalWan` is the algorithm and needs no engine; `CausalWanPipeline` is the same thing as vLLM loads it.
Held by tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs, SessionState
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.layers.narrow_view import NarrowView
from vllm_omni.model_executor.models.causal_wan import degradations, in_flight
from vllm_omni.model_executor.models.causal_wan.checkpoint import CheckpointLayout, find_layout
from vllm_omni.model_executor.models.causal_wan.config import resolve_plan
from vllm_omni.model_executor.models.causal_wan.request import read_chunk, read_shape
from vllm_omni.model_executor.models.causal_wan.sizes import StreamSizes
from vllm_omni.model_executor.models.causal_wan.state import Chunk, PastChunk, StateLayouts, StreamSession, StreamShape
from vllm_omni.model_executor.models.causal_wan.stream_setup import StreamSetup
from vllm_omni.model_executor.models.causal_wan.transformer import CausalWanTransformer, ChunkRow
from vllm_omni.model_executor.models.causal_wan.video_input import VideoEncoder
from vllm_omni.model_executor.models.causal_wan.weights import load_pipeline_weights
from vllm_omni.model_executor.models.wan.chunk_decoder import ChunkDecoder
from vllm_omni.model_executor.models.wan.prompts import SharedPrompts
from vllm_omni.model_executor.models.wan.split_decode import RowBands, whole_frames
from vllm_omni.model_executor.models.wan.text_encoder import TextEncoder
from vllm_omni.model_executor.models.wan.tiny_vae import TinyVAEDecoder, load_wanted
from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE, to_uint8
from vllm_omni.model_executor.noise import ChunkNoise
from vllm_omni.model_executor.schedules import every_second_step
from vllm_omni.model_executor.streaming.replay import rebuilt_from, still_visible
from vllm_omni.model_executor.vllm_model import StepPipeline
from vllm_omni.outputs import RequestFailed

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CausalWan(nn.Module):
    """Implements `SupportsStepExecution` for the part of the model that this rank holds."""

    supports_step_execution: ClassVar[bool] = True

    def __init__(self, setup: StreamSetup) -> None:
        super().__init__()
        self.build(setup)

    def build(self, setup: StreamSetup) -> None:
        """Create the sub-modules, in torch's default device; parameters are empty until loaded."""
        self.config = setup.config
        self.options = options = setup.options
        self.omni = setup.omni
        self.parallel = parallel = setup.parallel
        self.plan = resolve_plan(setup.config, options)
        self.schedule = options.text_schedule()
        self.text_encoder: TextEncoder | None = None
        if not parallel.is_vae_stage:
            self.text_encoder = TextEncoder(
                setup.text_config,
                setup.layout.tokenizer,
                max_tokens=setup.config.text_len,
                device=options.text_encoder_device or "model",
                dtype=setup.dtype,
            )
        temporal = setup.omni.pipeline == "temporal"
        self._own_step = parallel.stage if temporal and not parallel.is_vae_stage else None
        with default_dtype(setup.dtype):
            self.transformer = CausalWanTransformer(
                setup.config,
                replace(parallel, stage=int(parallel.is_vae_stage), num_stages=1) if temporal else parallel,
                residual_fp32=options.residual_dtype == "fp32",
                compiled=setup.compiled,
                cuda_graphs=options.cuda_graphs and torch.cuda.is_available(),
            )
        decodes = parallel.decodes
        vae_dtype = options.vae_torch_dtype(setup.dtype)
        self.vae = StreamingWanVAE(
            setup.vae_config,
            # on every rank with layers: each needs the noisy latents or their timestep
            encoder=options.video_input and not parallel.is_vae_stage,
            decoder=decodes and options.decoder == "wan",
            dtype=vae_dtype,
            compiled=setup.compiled,
            frames_per_call=options.vae_frames_per_call,
            bands=RowBands.of(parallel),
        )
        self.tiny_vae: TinyVAEDecoder | None = None
        self._wants_tiny_vae = setup.wants_tiny_vae
        tiny_vae_channels = setup.tiny_vae_channels  # read on every rank: each refuses a bad file
        if decodes and tiny_vae_channels is not None:
            self.tiny_vae = TinyVAEDecoder(tiny_vae_channels, dtype=vae_dtype)
        self.decoder: ChunkDecoder | None = None
        if self.tiny_vae is not None and options.decoder == "tiny":
            self.decoder = ChunkDecoder(self.tiny_vae)
        elif decodes:
            self.decoder = ChunkDecoder(self.vae, self.tiny_vae)
        self.video = VideoEncoder(self.vae, options) if self.vae.has_encoder else None
        spare = in_flight.spare_frames(options, self.plan, setup.omni, parallel)
        self.sizes = StreamSizes(self.config, options, self.plan, self.transformer, spare, self._own_step)
        self.prompts = SharedPrompts(self.transformer.cross_attention_kv)

    def load_checkpoint(self, layout: CheckpointLayout) -> None:
        """Fill every parameter this rank has, strictly. Raises ValueError."""
        vae = self.vae if self.vae.has_encoder or self.vae.has_decoder else None
        load_pipeline_weights(layout, self.config, self.transformer, vae, self.text_encoder)
        load_wanted(self.tiny_vae, layout, self._wants_tiny_vae)
        self.transformer.forget()
        self.prompts.forget()

    # -- sessions ------------------------------------------------------------------------------------------------------

    @property
    def shares_decode(self) -> bool:
        return self.parallel.shares_decode

    def session_nbytes(self, params: DiffusionParams) -> int:
        shape = self._read_shape(params)
        return self.sizes.cache_nbytes(shape) + self._reserved_bytes(shape)

    def new_session(self, params: DiffusionParams) -> StreamSession:
        shape = self._read_shape(params)
        if not params.prompt:
            raise RequestFailed("invalid_request", "a stream's first chunk needs a prompt")
        cache = self.sizes.new_cache(shape)
        layouts, reserved_bytes = self._layouts(shape), self._reserved_bytes(shape)
        return StreamSession(params.session_id, shape, self.plan, cache, layouts, reserved_bytes)

    def _read_shape(self, params: DiffusionParams) -> StreamShape:
        shape = read_shape(params, self.config, self.omni)
        if shape.source == "video" and not self.options.video_input:
            raise RequestFailed("invalid_request", "this server makes video from text only (omni.model.video_input)")
        self.vae.check_height(shape.height)
        return shape

    def _layouts(self, shape: StreamShape) -> StateLayouts:
        """What a stream's tensors beside its K/V windows are on this rank."""
        decoder = self.decoder if shape.output == "rgb" else None
        encodes = self.video is not None and shape.source == "video"
        return StateLayouts(
            None if decoder is None else decoder.state_layout(shape.height, shape.width),
            self.vae.encoder_cache_layout(shape.height, shape.width) if encodes else None,
            self.options.recache_on_prompt_switch and not self.parallel.is_vae_stage,
        )

    def _reserved_bytes(self, shape: StreamShape) -> int:
        """Bytes a stream may come to hold beside its K/V windows: VAE caches, cross-attention K/V, what it replays."""
        total = self.transformer.cross_kv_nbytes
        if self.decoder is not None and shape.output == "rgb":
            total += self.decoder.state_nbytes(shape.height, shape.width)
        behind = self.omni.chunks_in_flight - 1  # each may bring a prompt, and keeps where the input video stands
        total += behind * self.transformer.cross_kv_nbytes
        if self.video is not None and shape.source == "video":
            total += (1 + behind) * self.video.state_nbytes(shape.height, shape.width)
        if self.options.recache_on_prompt_switch and not self.parallel.is_vae_stage:
            total += self.sizes.past_nbytes(shape)
        return total

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def partition(self) -> tuple[int, ...]:
        return tuple(self.parallel.lengths(self.config.num_layers))

    def move_layers(self, move: LayerMove, sessions: Sequence[SessionState]) -> None:
        self.transformer.move_layers(move)
        self.parallel = self.transformer.parallel
        self.prompts.forget()
        for session in sessions:
            assert isinstance(session, StreamSession)
            for window in session.cache.windows:
                window.move_layers(move)
            session.cross_kv = None
            session.reserved_bytes = self._reserved_bytes(session.shape)

    # -- one chunk -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: DiffusionRequest) -> None:
        session, before = _session_of(request), request.predecessor
        standing = session.standing() if before is None else _chunk_of(before).standing()
        inputs = read_chunk(request, session, standing)
        frames = self.plan.frames(standing.chunk_index)
        size = self.sizes.latent_shape(session.shape, len(frames))
        if self.text_encoder is None:
            request.state = Chunk.to_decode(frames, self.schedule, size, session.cache, inputs, standing.chunk_index)
            request.num_steps = 1  # the ranks with layers know
            return
        noise = ChunkNoise(tuple(size), inputs.seed, standing.chunk_index, self.transformer.device)
        with request.timer.stage("text"):
            known = inputs.prompt == standing.prompt and standing.cross_kv is not None
            text = None if known else self.text_encoder.encode(inputs.prompt, self.transformer.device)
        latents, schedule, video = noise.draw(0), self.schedule, None
        if inputs.video is not None and self.video is not None:
            with request.timer.stage("video"):
                latents, schedule, video = self.video.noisy_latents(inputs.video, standing.video, latents)
        replay = self._replay(session, inputs.prompt)
        cache = session.cache.rebuild(rebuilt_from(replay)) if replay else session.cache
        request.state = Chunk(
            frames=frames,
            schedule=every_second_step(schedule) if degradations.FEWER_STEPS in request.degradations else schedule,
            latents=latents,
            noise=noise,
            rope=self.transformer.rope(frames, size),
            text=text,
            cache=cache,
            replay=replay,
            prompt=inputs.prompt,
            seed=inputs.seed,
            video=video,
            noise_scale=None if video is None else video.noise_scale,
            cross_kv=standing.cross_kv if known else None,
            index=standing.chunk_index,
            narrow=NarrowView(cache.clean) if degradations.SMALLER_WINDOW in request.degradations else None,
        )
        request.clean_passes = int(self.options.cache != "noise_matched")
        request.num_steps = len(replay) + request.state.schedule.num_steps + request.clean_passes

    def refuse_degradation(self, name: str) -> str | None:
        return degradations.refuse_degradation(name, self.options, self.plan)

    @property
    def steps_behind(self) -> int:
        return in_flight.steps_behind(self.options)

    def refuse_chunks_in_flight(self) -> str | None:
        return in_flight.refuse_chunks_in_flight(self.options, self.plan)

    def refuse_temporal_pipeline(self, num_stages: int) -> str | None:
        return in_flight.refuse_temporal_pipeline(self.options, num_stages)

    def batch_key(self, request: DiffusionRequest) -> Hashable:
        chunk = _chunk_of(request)
        return (chunk.replay[request.step] if request.step < len(chunk.replay) else chunk).latents.shape

    @torch.no_grad()
    def denoise_step(self, batch: Sequence[DiffusionRequest], hidden: torch.Tensor | None = None) -> torch.Tensor:
        for request in batch:
            self._begin_step(request)
        rows = [self._row(request) for request in batch]
        kv_only = all(_denoise_index(request) is None for request in batch)
        prediction: torch.Tensor = self.transformer(rows, hidden, kv_only=kv_only)
        for request in batch:
            self._end_step(request)
        return prediction

    @torch.no_grad()
    def step_scheduler(self, batch: Sequence[DiffusionRequest], prediction: torch.Tensor) -> None:
        for request, flow in zip(batch, prediction, strict=True):
            chunk, step = _chunk_of(request), _denoise_index(request)
            if step is None:
                continue
            assert chunk.noise is not None
            chunk.latents = chunk.schedule.advance(chunk.latents, flow, step, chunk.noise)

    def latents(self, request: DiffusionRequest) -> torch.Tensor:
        return _chunk_of(request).latents

    def set_latents(self, request: DiffusionRequest, latents: torch.Tensor) -> None:
        _chunk_of(request).latents = latents.clone()

    @torch.no_grad()
    def post_decode(self, request: DiffusionRequest) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        session, chunk = _session_of(request), _chunk_of(request)
        pixel_frames = self.plan.pixel_frames(session.chunk_index)
        meta: dict[str, Any] = {
            "first_frame": pixel_frames.start,
            "num_frames": len(pixel_frames),
            "height": session.shape.height,
            "width": session.shape.width,
            "seed": chunk.seed,
        }
        if chunk.noise_scale is not None:
            meta["noise_scale"] = chunk.noise_scale
        if session.shape.output == "latents":
            _go_with(request, degradations.TINY_VAE)
            return meta, {"latents": chunk.latents}
        assert self.decoder is not None, "ranks of the last stage decode: one, or all of them together"
        before = chunk.decoded_from = session.decoder_cache
        if not self.decoder.can_be_tiny(before):
            _go_with(request, degradations.TINY_VAE)
        tiny = degradations.TINY_VAE in request.degradations
        pixels, chunk.decoder_cache = self.decoder.decode(chunk.latents.unsqueeze(0), before, tiny=tiny)
        return meta, whole_frames(to_uint8(pixels), None if tiny else self.vae.bands)

    def hand_over(self, request: DiffusionRequest) -> dict[str, Any]:
        return {"noise_scale": _chunk_of(request).noise_scale}

    def take_over(self, request: DiffusionRequest, latents: torch.Tensor, facts: Mapping[str, Any]) -> None:
        chunk = _chunk_of(request)
        chunk.latents, chunk.noise_scale = latents, facts["noise_scale"]

    def commit(self, request: DiffusionRequest) -> None:
        session, chunk = _session_of(request), _chunk_of(request)
        if self._own_step is not None and chunk.index == 0 and not self.parallel.last_stage:
            # Later chunks see the first one as the last step left it, at every step.
            self.transformer([self._row(request, chunk.schedule.num_steps - 1)], None, kv_only=True)
        session.cache = chunk.cache
        session.cache.commit(chunk.frames)
        session.prompt, session.seed = chunk.prompt, chunk.seed
        session.cross_kv, session.video = chunk.cross_kv, chunk.video
        session.decoder_cache = chunk.decoder_cache
        session.chunk_index += 1
        if self.options.recache_on_prompt_switch and not self.parallel.is_vae_stage:
            past = PastChunk(chunk.frames, chunk.latents)
            session.past = still_visible((*session.past, past), self.plan, session.next_frames())

    def warmup_inputs(self) -> list[Inputs]:
        """A first and a later chunk of the largest size: a later one decodes more frames."""
        source = "video" if self.options.video_input else "text"
        params = DiffusionParams(session_id="warm-up", prompt="warm-up", options={"source": source})
        inputs: list[Inputs] = []
        for index, request in enumerate((params, msgspec.structs.replace(params, prompt=None))):
            shape = (len(self.plan.pixel_frames(index)), self.omni.height, self.omni.width, 3)
            video = {"video": torch.zeros(shape, dtype=torch.uint8)} if self.options.video_input else {}
            inputs.append((request, video))
        return inputs

    # -- parts of the above --------------------------------------------------------------------------------------------

    def _begin_step(self, request: DiffusionRequest) -> None:
        """Before a chunk's first forward: the prompt's K/V (collective under tensor parallelism). Before a pass over
        frames that stand elsewhere in the stream: the sinks' places.
        """
        chunk = _chunk_of(request)
        if chunk.cross_kv is None:
            assert chunk.text is not None
            chunk.cross_kv = self.prompts.get(chunk.prompt, chunk.text)
        if 0 < request.step <= len(chunk.replay):
            chunk.cache.keep_sinks(chunk.replay[request.step - 1].frames)
        if chunk.cache.has_sinks_per_step:
            chunk.cache.open(chunk.frames, request.step)
        elif request.step <= len(chunk.replay):
            past = request.step < len(chunk.replay)
            chunk.cache.open(chunk.replay[request.step].frames if past else chunk.frames)

    def _end_step(self, request: DiffusionRequest) -> None:
        """After a forward that ends what sinks are decided by: which of them are renewed. Ranks that share the heads
        decide together.
        """
        chunk, step = _chunk_of(request), request.step
        if chunk.cache.has_sinks_per_step:
            chunk.cache.keep_own_sinks(chunk.frames, step)
        elif step + 1 < request.num_steps:
            return
        sums = chunk.cache.resemblances(chunk.frames.stop, step)
        if sums is not None:
            if self.parallel.size > 1:
                dist.all_reduce(sums, group=self.parallel.group)
            chunk.cache.decide(chunk.frames.stop, sums, step)

    def _replay(self, session: StreamSession, prompt: str) -> tuple[PastChunk, ...]:
        """Return the chunks to run again before this one: those in the window, if it was made under another prompt."""
        switched = session.prompt is not None and prompt != session.prompt
        return session.past if switched and self.options.recache_on_prompt_switch else ()

    def _row(self, request: DiffusionRequest, step: int | None = None) -> ChunkRow:
        """What a forward needs of a chunk: at its next step, or at denoise step `step`."""
        chunk = _chunk_of(request)
        assert chunk.cross_kv is not None
        step, clean = _denoise_index(request) if step is None else step, chunk.schedule.num_steps
        past = chunk.replay[request.step] if request.step < len(chunk.replay) else None
        narrow = chunk.narrow if past is None else None
        return ChunkRow(
            latents=chunk.latents if past is None else past.latents,
            timestep=self.options.context_timestep if step is None else chunk.schedule.timesteps[step],
            frames=chunk.frames if past is None else past.frames,
            rope=chunk.rope if past is None else self.transformer.rope(past.frames, past.latents.shape),
            cross_kv=chunk.cross_kv,
            window=narrow or chunk.cache.at(clean if step is None else step),
        )


def _denoise_index(request: DiffusionRequest) -> int | None:
    """Return which denoise step the request is at; None at a clean pass, its own or a replayed one."""
    chunk = _chunk_of(request)
    step = request.step - len(chunk.replay)
    return step if 0 <= step < chunk.schedule.num_steps else None


def _session_of(request: DiffusionRequest) -> StreamSession:
    assert isinstance(request.session, StreamSession)
    return request.session


def _chunk_of(request: DiffusionRequest) -> Chunk:
    assert isinstance(request.state, Chunk), "prepare_encode has not run"
    return request.state


def _go_with(request: DiffusionRequest, name: str) -> None:
    """The chunk is made with what it was to go without: its result must not say otherwise."""
    request.degradations = tuple(other for other in request.degradations if other != name)


class CausalWanPipeline(CausalWan, StepPipeline):
    """`CausalWan` as vLLM's model loader builds and fills it."""

    def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
        StepPipeline.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.model_config = vllm_config.model_config
        assert isinstance(self.model_config.dtype, torch.dtype)
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        checkpoint = self.model_config.hf_config.causal_wan
        eager = self.model_config.enforce_eager
        self.build(StreamSetup.of(checkpoint, self._layout(), omni, self.model_config.dtype, eager=eager))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load every piece of the checkpoint strictly; `weights` (vLLM's flat file iterator) is not touched."""
        self.load_checkpoint(self._layout())
        return {name for name, _ in self.named_parameters()}

    def _layout(self) -> CheckpointLayout:
        return find_layout(Path(self.model_config.model))
