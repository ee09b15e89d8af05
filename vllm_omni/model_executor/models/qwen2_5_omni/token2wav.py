# SPDX-License-Identifier: Apache-2.0
"""Convert codec tokens to a waveform with transformers' flow-matching DiT and BigVGAN vocoder, on
the diffusion worker.

One solver interval (`flow.py`) is one denoise step, so an abort takes effect between intervals, and
several requests can share a batch. As in the reference, the solver is the 3/8-rule Runge-Kutta
method. It uses the same time grid and order of operations as the reference, so a whole clip matches
the output of transformers' `Qwen2_5OmniToken2WavModel.forward` bit for bit on the same machine.

B requests, T mel frames (`repeats` per code), M mel bins, N codes, S samples; G and D as in
`flow.py`.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel
from vllm.config import VllmConfig

from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.inputs import DiffusionParams, refuse_unused
from vllm_omni.model_executor.interfaces import DiffusionRequest, Inputs, SupportsStepExecution
from vllm_omni.model_executor.models.qwen2_5_omni.checkpoint import CheckpointTensors, load_voices
from vllm_omni.model_executor.models.qwen2_5_omni.flow import FlowSolver
from vllm_omni.model_executor.models.qwen2_5_omni.options import (
    SAMPLE_RATE,
    SpeechDefaults,
    Token2WavModelOptions,
    Token2WavRequestOptions,
)
from vllm_omni.model_executor.one_shot import OneShotSession
from vllm_omni.model_executor.schedules import standard_normal
from vllm_omni.model_executor.vllm_model import StepPipeline, launches_graphs
from vllm_omni.outputs import RequestFailed

_PREFIX = "token2wav."
_TIME_POINTS = 10
_GUIDANCE_SCALE = 0.5
_NO_GUIDANCE = 1e-5
"""Guidance scale below which the reference skips the unconditional half of the batch."""


@dataclass
class _Clip:
    """Working set of one token2wav request."""

    mel_1TM: torch.Tensor
    """Mel spectrogram at the current flow time."""
    conditions_GTD: torch.Tensor
    """Result of `FlowSolver.conditions`."""
    num_codes: int
    """Number of codes in the request, including context."""
    times: torch.Tensor
    """The solver's flow times."""
    guidance: float
    """The request's guidance scale."""
    options: Token2WavRequestOptions
    """The request's options."""
    repeats: bool
    """Whether more requests of this size will follow; see `FlowSolver.interval`."""


Request = DiffusionRequest[OneShotSession, _Clip]


class Token2WavPipeline(StepPipeline):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        model_options = parse_options(Token2WavModelOptions, omni.model, "omni.model")
        self.max_codes = model_options.max_codes
        self.path = Path(vllm_config.model_config.model)
        config: Any = Qwen2_5OmniToken2WavConfig(
            **vllm_config.model_config.hf_config.token2wav_config
        )
        self.dit_config: Any = config.dit_config
        bigvgan: Any = config.bigvgan_config
        self.samples_per_code = self.dit_config.repeats * math.prod(bigvgan.upsample_rates)
        self.token2wav = Qwen2_5OmniToken2WavModel(config).float().eval()
        self.voices = load_voices(self.path)
        graphs = launches_graphs(model_options.cuda_graphs, eager=False)
        self.fast_paths = (graphs,)
        self.flow = FlowSolver.create(self.token2wav.code2wav_dit_model, graphs.is_on)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load token2wav's tensors from the checkpoint files. `weights`, which contains all of the
        checkpoint's tensors, is ignored.
        """
        state = dict(CheckpointTensors(self.path).below(_PREFIX))
        # Loading is strict: missing, unexpected and misshapen keys all raise. The resampling
        # filters are computed, not stored.
        missing, unexpected = self.token2wav.load_state_dict(state, strict=False)
        missing = [name for name in missing if not name.endswith(".filter")]
        if missing or unexpected:
            found = (
                f"{len(missing)} missing {missing[:3]}, {len(unexpected)} unexpected "
                f"{unexpected[:3]}"
            )
            raise ValueError(f"token2wav weights: {found}")
        self.flow.clear_graphs()
        return {name for name, _ in self.named_parameters()}

    # -- the step protocol -------------------------------------------------------------------------

    def session_nbytes(self, params: DiffusionParams) -> int:
        frames = self.max_codes * self.dit_config.repeats
        return 4 * frames * (self.dit_config.mel_dim + self.dit_config.enc_emb_dim)

    def new_session(self, params: DiffusionParams) -> OneShotSession:
        if not params.one_shot:
            raise RequestFailed(
                "invalid_request", "token2wav keeps nothing between requests: send one_shot"
            )
        return OneShotSession(params.session_id, self.session_nbytes(params))

    def prepare_encode(self, request: Request) -> None:
        params = request.params
        refuse_unused(params, ("seed", "num_inference_steps", "guidance_scale"))
        try:
            options = parse_options(Token2WavRequestOptions, params.options, "options")
        except ValueError as error:
            raise RequestFailed("invalid_request", str(error)) from error
        if options.voice not in self.voices:
            raise RequestFailed(
                "invalid_request",
                f"voice {options.voice!r}; known: {', '.join(sorted(self.voices))}",
            )
        points = _TIME_POINTS if params.num_inference_steps is None else params.num_inference_steps
        if points < 2:
            raise RequestFailed(
                "invalid_request",
                f"num_inference_steps counts time points, at least 2, got {points}",
            )
        codes_1N = self._codes(request, options)
        device = self._device
        noise_1TM = self._noise(codes_1N.shape[1], params.seed or 0, options)
        voice = self.voices[options.voice]
        times = torch.linspace(0, 1, points)
        times += options.sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
        guidance = _GUIDANCE_SCALE if params.guidance_scale is None else params.guidance_scale
        request.state = _Clip(
            mel_1TM=noise_1TM.to(device),
            conditions_GTD=self.flow.conditions(
                codes_1N.to(device),
                voice.cond.to(device),
                voice.ref_mel.to(device),
                guidance >= _NO_GUIDANCE,
            ),
            num_codes=codes_1N.shape[1],
            times=times.to(device),
            guidance=guidance,
            options=options,
            # Whole clips and last chunks have arbitrary lengths, so a CUDA graph would not pay off.
            repeats=options.first_code is not None
            and noise_1TM.shape[1] % self.dit_config.block_size == 0,
        )
        request.num_steps = points - 1

    @property
    def _device(self) -> torch.device:
        return next(self.token2wav.parameters()).device

    def _codes(self, request: Request, options: Token2WavRequestOptions) -> torch.Tensor:
        codes = request.tensors.get("codes")
        if codes is None or codes.dim() != 1 or codes.is_floating_point() or codes.numel() == 0:
            raise RequestFailed(
                "invalid_request", "tensor `codes` must hold codec tokens, integers [N] with N >= 1"
            )
        limit = min(
            self.max_codes, self.dit_config.max_position_embeddings // self.dit_config.repeats
        )
        if codes.numel() > limit:
            raise RequestFailed(
                "invalid_request", f"{codes.numel()} codes arrived, a request may bring {limit}"
            )
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high >= self.dit_config.num_embeds:
            raise RequestFailed(
                "invalid_codes",
                f"codes must be from 0 to {self.dit_config.num_embeds - 1}, got {low} to {high}",
            )
        if options.left_codes + options.right_codes >= codes.numel():
            raise RequestFailed(
                "invalid_request",
                f"left_codes + right_codes leave nothing of {codes.numel()} codes",
            )
        return codes.long().unsqueeze(0)

    def _noise(self, num_codes: int, seed: int, options: Token2WavRequestOptions) -> torch.Tensor:
        repeats, mel = self.dit_config.repeats, self.dit_config.mel_dim
        if options.first_code is None:
            generator = torch.Generator().manual_seed(seed)
            return torch.randn([1, num_codes * repeats, mel], generator=generator)
        numbers = range(options.first_code, options.first_code + num_codes)
        return torch.cat(
            [standard_normal((repeats, mel), seed, number, 0) for number in numbers]
        ).unsqueeze(0)

    def batch_key(self, request: Request) -> Hashable:
        clip: _Clip = request.work
        return clip.mel_1TM.shape, clip.conditions_GTD.shape, clip.repeats

    def denoise_step(
        self, batch: Sequence[Request], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one solver interval for each request, and return the change in the mel spectrogram,
        [B, T, M].
        """
        clips: list[_Clip] = [request.work for request in batch]
        mel_BTM = torch.cat([clip.mel_1TM for clip in clips])
        # All conditional halves come first, followed by all unconditional halves. Splitting a
        # request's conditions along the first axis yields its halves in this order.
        halves = zip(
            *(clip.conditions_GTD.chunk(clip.conditions_GTD.shape[0]) for clip in clips),
            strict=True,
        )
        conditions_GTD = torch.cat([part for half in halves for part in half])
        guidance_B11 = torch.tensor([clip.guidance for clip in clips], device=mel_BTM.device).view(
            -1, 1, 1
        )
        pairs = [
            clip.times[request.step : request.step + 2]
            for clip, request in zip(clips, batch, strict=True)
        ]
        start_B11, end_B11 = torch.stack(pairs, dim=1).view(2, -1, 1, 1)
        return self.flow.interval(
            mel_BTM,
            start_B11,
            end_B11,
            conditions_GTD,
            guidance_B11,
            repeats=clips[0].repeats,
        )

    def step_scheduler(self, batch: Sequence[Request], prediction: torch.Tensor) -> None:
        for request, change_TM in zip(batch, prediction, strict=True):
            request.work.mel_1TM = request.work.mel_1TM + change_TM

    def latents(self, request: Request) -> torch.Tensor:
        return request.work.mel_1TM

    def set_latents(self, request: Request, latents: torch.Tensor) -> None:
        request.work.mel_1TM = latents.clone()

    def post_decode(self, request: Request) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        clip: _Clip = request.work
        meta = {"sample_rate": SAMPLE_RATE, "num_codes": clip.num_codes}
        if request.params.output == "latents":
            return meta, {"latents": clip.mel_1TM}
        wave_S = (
            self.token2wav.code2wav_bigvgan_model(clip.mel_1TM.permute(0, 2, 1)).reshape(-1).float()
        )
        first = clip.options.left_codes * self.samples_per_code
        last = wave_S.numel() - clip.options.right_codes * self.samples_per_code
        return meta, {"audio": wave_S[first:last].contiguous()}

    def commit(self, request: Request) -> None:
        request.session.chunk_index += 1

    def warmup_inputs(self) -> list[Inputs]:
        """Return the inputs for audio chunks of the default sizes and for a whole clip. The second
        interval of each chunk is captured as a CUDA graph.
        """
        voice = {"voice": next(iter(self.voices))}
        sizes = [size for size in SpeechDefaults().part_sizes if size <= self.max_codes]
        components: list[Inputs] = [
            (
                DiffusionParams(
                    session_id=f"warm-up-{size}",
                    one_shot=True,
                    num_inference_steps=3,
                    options={**voice, "first_code": 0},
                ),
                {"codes": torch.zeros(size, dtype=torch.int64)},
            )
            for size in sizes
        ]
        clip = DiffusionParams(
            session_id="warm-up", one_shot=True, num_inference_steps=2, options=voice
        )
        return [
            *components,
            (clip, {"codes": torch.zeros(min(self.max_codes, 256), dtype=torch.int64)}),
        ]


if TYPE_CHECKING:

    def _meets_protocol(model: Token2WavPipeline) -> SupportsStepExecution[OneShotSession, _Clip]:
        return model
