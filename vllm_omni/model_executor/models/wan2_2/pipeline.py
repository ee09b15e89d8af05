# SPDX-License-Identifier: Apache-2.0
"""The Wan 2.2 pipeline (also Wan 2.1 text-to-video): one denoise step per engine step.

    x = noise(seed)                                            prepare_encode
    for t in UniPC timesteps:
        net = transformer if t >= boundary else transformer_2
        v, v_neg = net([x, x], t, [prompt, negative prompt])   denoise_step, one forward pass
        v = v_neg + guidance (v - v_neg)
        x = UniPC step(v, t, x)                                step_scheduler
    frames = vae.decode(x)                                     post_decode

A start image is used in one of two ways. With `i2v`, the latents of [image, grey, grey, ...] and a
mask are additional input channels. With `ti2v`, the latents of the image replace the first latent
frame of x, and the tokens of this frame have timestep 0.

Requests at different denoise steps share a forward pass if they have the same size and use the same
expert (`batch_key`). Noise is sampled on the CPU as in diffusers, so the same seed produces the
same video as in diffusers.

`Wan22` is the model and does not depend on the engine. vLLM loads `Wan22Pipeline`, which owns the
model.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs, SupportsStepExecution
from vllm_omni.model_executor.layers.attention.rope import rope_tables
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.fast_path import FastPath
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.wan.text_encoder.encoder import prompt_key, text_encoder_of
from vllm_omni.model_executor.models.wan.text_encoder.prompts import SharedPrompts
from vllm_omni.model_executor.models.wan.vae.vae import to_uint8
from vllm_omni.model_executor.models.wan2_2.checkpoint import Wan22Layout, find_layout
from vllm_omni.model_executor.models.wan2_2.config import (
    NUM_TRAIN_TIMESTEPS,
    Wan22Checkpoint,
    Wan22Config,
    Wan22Options,
)
from vllm_omni.model_executor.models.wan2_2.guidance import GuidanceRanks
from vllm_omni.model_executor.models.wan2_2.request import (
    VideoRequest,
    default_num_frames,
    read_image,
    read_request,
)
from vllm_omni.model_executor.models.wan2_2.schedule import new_scheduler
from vllm_omni.model_executor.models.wan2_2.transformer import VideoItem, Wan22Transformer
from vllm_omni.model_executor.models.wan2_2.vae import VideoVAE
from vllm_omni.model_executor.models.wan2_2.weights import adapter_targets, load_pipeline_weights
from vllm_omni.model_executor.one_shot import OneShotSession
from vllm_omni.model_executor.step_cache import computed_steps, step_cache_meta
from vllm_omni.model_executor.vllm_model import CheckpointPipeline, ServedCheckpoint, compiles
from vllm_omni.outputs import RequestFailed

EXPERTS = ("transformer", "transformer_2")
_WARM_UP_STEPS = 2
"""Number of denoise steps during warm-up. Two steps are enough to run both experts, because the
second timestep is below the boundary of every published checkpoint.
"""
_SCHEDULER_COPIES = 4
"""Number of latent-sized tensors that second-order UniPC needs in addition to the latents: two
stored outputs, the last sample and the current output.
"""


@dataclass(frozen=True)
class Wan22Setup:
    """Resolved and validated constructor arguments of `Wan22`."""

    config: Wan22Config
    """Architecture of each transformer."""
    checkpoint: Wan22Checkpoint
    """Conditioning, experts and VAE sizes of the checkpoint."""
    vae: Mapping[str, Any]
    """Arguments of diffusers' `AutoencoderKLWan`."""
    text_config: Mapping[str, Any]
    """`UMT5Config` values of the text encoder."""
    scheduler: Mapping[str, Any]
    """Content of `scheduler_config.json`."""
    tokenizer: Path | None
    """Tokenizer folder, or None if it is missing."""
    options: Wan22Options
    """Model options."""
    omni: OmniConfig
    """Server options."""
    parallel: ParallelContext
    """Parallelism of this rank."""
    dtype: torch.dtype
    """Dtype of the transformers."""
    compiled: bool
    """Whether pointwise ops are compiled."""
    guidance: "GuidanceRanks | None" = None
    """Guidance branch of this rank, or None if the rank runs both branches."""
    quantization: QuantizationConfig | None = None
    """Quantization of the transformers' weights."""
    fast_paths: tuple[FastPath, ...] = ()
    """Fast implementations considered for this setup, with the reason for each one that is not
    used.
    """

    @classmethod
    def of_checkpoint(
        cls,
        values: Mapping[str, Any],
        tokenizer: Path | None,
        omni: OmniConfig,
        dtype: torch.dtype,
        parallel: ParallelContext | None = None,
        eager: bool = True,
        quantization: QuantizationConfig | None = None,
    ) -> "Wan22Setup":
        """Resolve the options for a checkpoint.

        Args:
            values: Description of the checkpoint, `hf_config(...)["wan2_2"]`.
            parallel: Parallelism of this rank. By default, it is derived from vLLM's process
                groups.
            eager: Whether the engine runs with `--enforce-eager`.

        Raises:
            ValueError: An option is invalid.
        """
        options = Wan22Options.parse(omni.model)
        parallel = parallel or ParallelContext.from_vllm(
            options.sequence_parallel, omni.vae_stage, omni.partition
        )
        guidance = None
        if options.cfg_parallel:
            guidance, parallel = (
                GuidanceRanks.of_parallel(parallel),
                replace(parallel, rank=0, size=1, group=None),
            )
        compiled = compiles(options.compile, eager)
        return cls(
            config=Wan22Config.from_checkpoint(values["transformer"]),
            checkpoint=Wan22Checkpoint(**values["facts"]),
            vae=values["vae"],
            text_config=values["umt5"],
            scheduler=values["scheduler"],
            tokenizer=tokenizer,
            options=options,
            omni=omni,
            parallel=parallel,
            dtype=dtype,
            compiled=compiled.is_on,
            fast_paths=(compiled, parallel.peer_path),
            quantization=quantization,
            guidance=guidance,
        )


@dataclass(eq=False)
class VideoWork:
    """Working set of a request on this rank."""

    request: VideoRequest
    """The validated request."""
    latents: torch.Tensor
    """Latents of the video, fp32 [z_dim, F, h, w]."""
    condition: torch.Tensor | None
    """Conditioning on the start image, or None if there is no start image. It consists of the mask
    and latents [factor + z_dim, F, h, w] for `i2v`, and of latents [z_dim, 1, h, w] for `ti2v`.
    """
    texts: tuple[tuple[str, torch.Tensor], ...]
    """The prompt and, with guidance, the negative prompt, as (key, embeddings) pairs. The key is
    the result of `prompt_key`.
    """
    scheduler: Any
    """Scheduler of this request. It is stepped only on the last pipeline stage."""
    timesteps: tuple[float, ...]
    """Timestep of each denoise step."""
    rope: tuple[torch.Tensor, torch.Tensor]
    """Rotary tables (cos, sin) of the video's tokens."""
    clean_frames: int
    """Number of leading latent frames with timestep 0."""
    expert: str = ""
    """Name of the expert that `cross_kv` was computed for."""
    cross_kv: list[torch.Tensor] = field(default_factory=list)
    """Cross-attention K/V of `texts` for one expert."""
    computed: tuple[bool, ...] = ()
    """For each denoise step, whether the step runs the network. A step that does not run the
    network uses `flow`.
    """
    flow: torch.Tensor | None = None
    """Prediction from the last step that ran the network, or None before the first step."""

    @classmethod
    def to_decode(cls, request: VideoRequest) -> "VideoWork":
        """Return the working set of a request on the VAE stage. The latents arrive later from the
        previous stage.
        """
        nothing = torch.empty(request.latent_shape, device="meta")
        return cls(request, nothing, None, (), None, (), (nothing, nothing), 0)


Request = DiffusionRequest[OneShotSession, VideoWork]


class Wan22(nn.Module):
    """The components and layers of Wan 2.2 on one rank. The class implements
    `SupportsStepExecution`.
    """

    supports_step_execution: ClassVar[bool] = True

    def __init__(self, setup: Wan22Setup) -> None:
        super().__init__()
        self.config, self.checkpoint = setup.config, setup.checkpoint
        self.options, self.omni = setup.options, setup.omni
        self.fast_paths = setup.fast_paths
        self.scheduler_values = setup.scheduler
        self.parallel = parallel = setup.parallel
        self.text_encoder = text_encoder_of(
            parallel,
            setup.text_config,
            setup.tokenizer,
            max_tokens=setup.config.text_len,
            device=self.options.text_encoder_device,
            dtype=setup.dtype,
        )
        names = EXPERTS if self.checkpoint.two_experts else EXPERTS[:1]
        with default_dtype(setup.dtype):
            self.experts = nn.ModuleDict(
                {
                    name: Wan22Transformer(
                        setup.config,
                        parallel,
                        compiled=setup.compiled,
                        quantization=setup.quantization,
                        prefix=name,
                    )
                    for name in names
                }
            )
        self.guidance = setup.guidance
        self.decodes = parallel.decodes and (self.guidance is None or self.guidance.branch == 0)
        self.vae: VideoVAE | None = None
        # Every rank that holds layers encodes the start image.
        encodes = self.checkpoint.kind != "t2v" and not parallel.is_vae_stage
        if self.decodes or encodes:
            vae_dtype = self.options.vae_torch_dtype(setup.dtype)
            self.vae = VideoVAE(setup.vae, dtype=vae_dtype, tiling=self.options.vae_tiling)
        self.prompts = {
            (name, branch): SharedPrompts(self._expert(name).cross_attention_kv)
            for name in names
            for branch in (0, 1)
        }

    def load_checkpoint(self, layout: Wan22Layout) -> None:
        """Load all parameters of this rank strictly.

        Raises:
            ValueError: A component is missing or does not match the model.
        """
        load_pipeline_weights(
            layout, self.config, dict(self.experts.items()), self.vae, self.text_encoder
        )
        for prompts in self.prompts.values():
            prompts.clear_prompt()

    def adapter_targets(self) -> dict[str, AdapterTarget]:
        return adapter_targets(dict(self.experts.items()), self.config)

    def _expert(self, name: str) -> Wan22Transformer:
        expert = self.experts[name]
        assert isinstance(expert, Wan22Transformer)
        return expert

    @property
    def device(self) -> torch.device:
        return self._expert("transformer").device

    # -- sessions ----------------------------------------------------------------------------------

    def session_nbytes(self, params: DiffusionParams) -> int:
        """Return the size in bytes of a request's state: latents, scheduler, conditioning, and the
        cross-attention K/V of two prompts for one expert.
        """
        request = self._read(params)
        latents = 4 * torch.Size(request.latent_shape).numel()
        retained = request.step_cache is not None
        copies = (
            1 + _SCHEDULER_COPIES + retained + self.checkpoint.in_channels / self.checkpoint.z_dim
        )
        return int(copies * latents) + 2 * self._expert("transformer").cross_kv_nbytes

    def new_session(self, params: DiffusionParams) -> OneShotSession:
        return OneShotSession(params.session_id, self.session_nbytes(params))

    def _read(self, params: DiffusionParams) -> VideoRequest:
        return read_request(params, self.checkpoint, self.options, self.omni)

    # -- one video ---------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_encode(self, request: Request) -> None:
        wanted = self._read(request.params)
        if wanted.step_cache is not None and self.parallel.num_stages > 1:
            raise RequestFailed(
                "invalid_request",
                "step_cache needs ranks with all layers each; this server's are split over stages",
            )
        image = read_image(request.tensors, wanted, self.checkpoint)
        if self.text_encoder is None:
            request.state = VideoWork.to_decode(wanted)
            request.num_steps = 1  # not used on a VAE stage
            return
        generator = torch.Generator().manual_seed(wanted.seed)
        noise = torch.randn((1, *wanted.latent_shape), generator=generator, dtype=torch.float32)[0]
        with request.timer.stage("text"):
            prompts = [wanted.prompt, wanted.negative_prompt] if wanted.guided else [wanted.prompt]
            texts = tuple(
                (prompt_key(prompt), self.text_encoder.encode(prompt, self.device))
                for prompt in prompts
            )
        condition = None
        if image is not None:
            with request.timer.stage("image"):
                condition = self._condition(image, wanted)
        scheduler = new_scheduler(
            self.scheduler_values, wanted.num_inference_steps, wanted.flow_shift, self.device
        )
        _, frames, height, width = wanted.latent_shape
        cos, sin = rope_tables(self.config.head_dim, range(frames), height // 2, width // 2)
        own = self.parallel.token_slice(len(cos))
        request.state = VideoWork(
            request=wanted,
            latents=noise.to(self.device),
            condition=condition,
            texts=texts,
            scheduler=scheduler,
            timesteps=tuple(float(t) for t in scheduler.timesteps.tolist()),
            rope=(cos[own].to(self.device), sin[own].to(self.device)),
            clean_frames=int(self.checkpoint.kind == "ti2v" and condition is not None),
        )
        request.num_steps = len(request.work.timesteps)
        request.work.computed = self._computed_steps(request.work)

    def texts(self, request: Request) -> list[torch.Tensor]:
        return [rows for _, rows in request.work.texts]

    def batch_key(self, request: Request) -> Hashable:
        video = request.work
        return (
            video.request.latent_shape,
            self._expert_at(video, request.step),
            video.clean_frames,
            video.computed[request.step],
        )

    @torch.no_grad()
    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not batch[0].work.computed[batch[0].step]:
            return torch.stack([self._kept(request.work) for request in batch])
        rows, name = [], self._expert_at(batch[0].work, batch[0].step)
        for request in batch:
            video = request.work
            self._switch_expert(video, name)
            inputs = self._inputs(video)
            rows += [
                VideoItem(
                    inputs, video.timesteps[request.step], video.rope, cross_kv, video.clean_frames
                )
                for cross_kv in video.cross_kv
            ]
        predictions: torch.Tensor = self._expert(name)(rows, hidden)
        if not self.parallel.last_stage:
            return predictions
        videos = [request.work for request in batch]
        if self.guidance is not None:
            predictions = self.guidance.join(predictions, [len(video.texts) for video in videos])
        flows, row = [], 0
        for video in videos:
            branches = predictions[row : row + len(video.texts)]
            row += len(video.texts)
            guidance = video.request.guidance if name == EXPERTS[0] else video.request.guidance_2
            flow = (
                branches[0]
                if len(branches) == 1
                else branches[1] + guidance * (branches[0] - branches[1])
            )
            flows.append(flow)
            if video.request.step_cache is not None:
                video.flow = flow
        return torch.stack(flows)

    @torch.no_grad()
    def step_scheduler(self, batch: Sequence[Request], prediction: torch.Tensor) -> None:
        for request, flow in zip(batch, prediction, strict=True):
            video = request.work
            timestep = video.scheduler.timesteps[request.step]
            video.latents = video.scheduler.step(
                flow[None], timestep, video.latents[None], return_dict=False
            )[0][0]
            if request.step + 1 == request.num_steps and video.clean_frames:
                video.latents = self._with_image(video)

    def latents(self, request: Request) -> torch.Tensor:
        return request.work.latents

    def set_latents(self, request: Request, latents: torch.Tensor) -> None:
        request.work.latents = latents.clone()

    @torch.no_grad()
    def post_decode(self, request: Request) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        video = request.work
        wanted = video.request
        meta = {
            "num_frames": wanted.num_frames,
            "height": wanted.height,
            "width": wanted.width,
            "seed": wanted.seed,
            "num_inference_steps": wanted.num_inference_steps,
            "fps": wanted.fps,
            **step_cache_meta(wanted.step_cache, video.computed),
        }
        if request.params.output == "latents":
            return meta, {"latents": video.latents}
        assert self.vae is not None, "only one rank of the last stage decodes"
        return meta, {"frames": to_uint8(self.vae.decode(video.latents))}

    def pack_decode_state(self, request: Request) -> dict[str, Any]:
        return {}

    def unpack_decode_state(
        self, request: Request, latents: torch.Tensor, info: Mapping[str, Any]
    ) -> None:
        request.work.latents = latents

    def commit(self, request: Request) -> None:
        request.session.chunk_index += 1

    def warmup_inputs(self) -> list[Inputs]:
        """Return requests for videos of the largest size. Each request has two denoise steps, so
        that both experts run.

        For TI2V, one request has a start image and another has none. The tokens of a start image
        have a separate timestep, so the two kinds of request are compiled separately.
        """
        params = DiffusionParams(
            session_id="warm-up",
            one_shot=True,
            prompt="warm-up",
            num_frames=self._largest_num_frames(),
            num_inference_steps=_WARM_UP_STEPS,
        )
        image = {"image": torch.zeros((self.omni.height, self.omni.width, 3), dtype=torch.uint8)}
        if self.checkpoint.kind == "t2v":
            return [(params, {})]
        if self.checkpoint.kind == "i2v":
            return [(params, image)]
        text = msgspec.structs.replace(params, session_id="warm-up-text", output="latents")
        return [(text, {}), (params, image)]

    # -- experts and inputs ------------------------------------------------------------------------

    def _largest_num_frames(self) -> int:
        factor = self.checkpoint.temporal_factor
        return max(
            default_num_frames(self.checkpoint, self.options),
            1 + (self.options.max_num_frames - 1) // factor * factor,
        )

    def _expert_at(self, video: VideoWork, step: int) -> str:
        """Return the name of the expert that runs in a step. The second expert runs only at
        timesteps strictly below the boundary.
        """
        ratio = self.checkpoint.boundary_ratio
        below = ratio is not None and video.timesteps[step] < ratio * NUM_TRAIN_TIMESTEPS
        return EXPERTS[below]

    def _computed_steps(self, video: VideoWork) -> tuple[bool, ...]:
        """Return, for each step, whether the step is computed. The first step of each expert is
        always computed.
        """
        threshold, steps = video.request.step_cache, range(len(video.timesteps))
        if threshold is None:
            return (True,) * len(steps)
        experts = [self._expert_at(video, step) for step in steps]
        firsts = {step for step in steps[1:] if experts[step] != experts[step - 1]}
        return computed_steps(
            self._expert(experts[0]).modulation_of(video.timesteps), threshold, firsts
        )

    @staticmethod
    def _kept(video: VideoWork) -> torch.Tensor:
        assert video.flow is not None, "the first step is computed"
        return video.flow

    def _switch_expert(self, video: VideoWork, name: str) -> None:
        """Compute the cross-attention K/V of the prompts for the `name` expert, unless the stored
        K/V already belong to that expert. With tensor parallelism, this is a collective operation.
        """
        if video.expert != name:
            own = (
                range(len(video.texts))
                if self.guidance is None
                else self.guidance.own(len(video.texts))
            )
            video.cross_kv = [
                self.prompts[name, branch].get(*video.texts[branch]) for branch in own
            ]
            video.expert = name

    def _inputs(self, video: VideoWork) -> torch.Tensor:
        """Return the network's input: the latents alone, the latents with the conditioning as
        additional channels, or the latents with the start image as their first latent frame.
        """
        if video.condition is None:
            return video.latents
        if video.clean_frames:
            return self._with_image(video)
        return torch.cat((video.latents, video.condition))

    def _with_image(self, video: VideoWork) -> torch.Tensor:
        assert video.condition is not None
        return torch.cat((video.condition, video.latents[:, video.clean_frames :]), dim=1)

    def _condition(self, image_HWC: torch.Tensor, wanted: VideoRequest) -> torch.Tensor:
        """Return the conditioning for a start image. For `ti2v`, it consists of the image latents,
        [z_dim, 1, h, w]. For `i2v`, it consists of the mask and latents of all frames, [factor +
        z_dim, F, h, w].
        """
        assert self.vae is not None
        # As in diffusers, pixels are scaled to [0, 1] first and then to [-1, 1], so that they are
        # bit-identical to those of diffusers.
        pixels = 2.0 * (image_HWC.to(self.device).float() / 255.0) - 1.0
        pixels_1C1HW = pixels.permute(2, 0, 1)[None, :, None]
        if self.checkpoint.kind == "ti2v":
            return self.vae.encode(pixels_1C1HW)
        grey = pixels_1C1HW.new_zeros((1, 3, wanted.num_frames - 1, wanted.height, wanted.width))
        latents = self.vae.encode(torch.cat((pixels_1C1HW, grey), dim=2))
        mask = latents.new_zeros((self.checkpoint.temporal_factor, *latents.shape[1:]))
        mask[:, 0] = 1.0
        return torch.cat((mask, latents))


class Wan22Pipeline(CheckpointPipeline[Wan22Layout]):
    """The class that vLLM's model loader instantiates and loads weights into. It owns a `Wan22`."""

    def find_layout(self, path: Path) -> Wan22Layout:
        return find_layout(path)

    def build_model(self, served: ServedCheckpoint[Wan22Layout]) -> Wan22:
        values = served.hf_config.wan2_2
        return Wan22(
            Wan22Setup.of_checkpoint(
                values,
                served.layout.tokenizer,
                served.omni,
                served.dtype,
                eager=served.eager,
                quantization=served.quantization,
            )
        )


if TYPE_CHECKING:

    def _meets_protocol(model: Wan22) -> SupportsStepExecution[OneShotSession, VideoWork]:
        return model
