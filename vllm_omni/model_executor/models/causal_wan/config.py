# SPDX-License-Identifier: Apache-2.0
"""What a causal Wan 2.1 checkpoint is (`CausalWanConfig`) and how it is served (`CausalWanOptions`).

The architecture comes from the checkpoint and is checked key by key. The options come from
`additional_config["omni"]["model"]`. Held by tests/model_executor/models/causal_wan/test_causal_wan_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import torch

from vllm_omni.config import parse_options
from vllm_omni.model_executor.models.causal_wan.motion import lowest_first_timestep
from vllm_omni.model_executor.models.wan.architecture import read_architecture
from vllm_omni.model_executor.models.wan.chunk_plan import VAE_SPATIAL, WanChunkPlan, check_sliding
from vllm_omni.model_executor.schedules import FewStepSchedule, few_step_schedule, nearest_schedule

LATENT_CHANNELS = 16
_WINDOW, _SINK, _CHUNK = 21, 3, 3
"""Defaults of a checkpoint that names no window: the length it was trained on, one chunk of it kept for ever."""

CacheKind = Literal["strict", "noise_matched", "cascaded"]


@dataclass(frozen=True)
class CausalWanConfig:
    """The transformer's architecture; the defaults are the 1.3-billion-parameter model.

    window_frames, sink_frames, frames_per_chunk: what the checkpoint recommends; None = nothing.
    """

    dim: int = 1536
    ffn_dim: int = 8960
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    in_channels: int = LATENT_CHANNELS
    out_channels: int = LATENT_CHANNELS
    num_heads: int = 12
    num_layers: int = 30
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    window_frames: int | None = None
    sink_frames: int | None = None
    frames_per_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2 or self.head_dim < 6:
            raise ValueError(f"dim {self.dim} over {self.num_heads} heads must give an even head size >= 6")
        if self.patch_size != (1, 2, 2):
            raise ValueError(f"patch_size must be (1, 2, 2), got {self.patch_size}")
        if self.freq_dim % 2:
            raise ValueError(f"freq_dim must be even, got {self.freq_dim}")
        if (self.in_channels, self.out_channels) != (LATENT_CHANNELS, LATENT_CHANNELS):
            raise ValueError(
                f"this is the text-to-video network: channels must be {LATENT_CHANNELS} in and out, "
                f"got {self.in_channels} and {self.out_channels}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Pixel size -> latent size. Raises ValueError unless both are multiples of 16."""
        multiple = VAE_SPATIAL * self.patch_size[1]
        if height % multiple or width % multiple or min(height, width) < multiple:
            raise ValueError(f"height and width must be multiples of {multiple} pixels, got {height}x{width}")
        return height // VAE_SPATIAL, width // VAE_SPATIAL

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "CausalWanConfig":
        """Read a transformer `config.json` in either key style; an empty map means 1.3B.

        Raises ValueError naming unknown keys, and every value that this code does not implement.
        """
        slides = values.get("local_attn_size", -1) != -1
        skipped = () if slides else ("local_attn_size", "sink_size")
        return cls(**read_architecture(values, _RENAMED, _REQUIRED, (*_IGNORED, *skipped), cls.num_heads, cls.dim))


_RENAMED = {
    "dim": "dim",
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "text_dim": "text_dim",
    "text_len": "text_len",
    "in_dim": "in_channels",
    "in_channels": "in_channels",
    "out_dim": "out_channels",
    "out_channels": "out_channels",
    "num_heads": "num_heads",
    "num_attention_heads": "num_heads",
    "attention_head_dim": "attention_head_dim",
    "num_layers": "num_layers",
    "patch_size": "patch_size",
    "eps": "eps",
    "local_attn_size": "window_frames",
    "sliding_window_num_frames": "window_frames",
    "sink_size": "sink_frames",
    "num_frame_per_block": "frames_per_chunk",
    "num_frames_per_block": "frames_per_chunk",
}
"""Checkpoint key -> field, original style and diffusers style."""

CLASSES = ("CausalWanModel", "CausalWanTransformer3DModel", "WanModel", "WanTransformer3DModel")

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": CLASSES,
    "model_type": ("t2v",),
    "qk_norm": (True, "rms_norm_across_heads"),
    "cross_attn_norm": (True,),
    "image_dim": (None,),
    "added_kv_proj_dim": (None,),
    "pos_embed_seq_len": (None,),
    "window_size": ([-1, -1], (-1, -1)),
    "independent_first_frame": (False,),
}
"""Keys whose value must be one that the code implements."""

_IGNORED = (
    *("_diffusers_version", "_name_or_path", "rope_max_seq_len", "architectures", "torch_dtype", "dtype"),
    *("latent_hw", "rope_cache_policy"),
)
"""Keys that change nothing here (rotations are computed, so there is no longest sequence)."""


class CausalWanOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options; each is one of the choices on which the public implementations differ.

    cache: what a chunk's past is. `strict`: the clean chunk, by one more pass at `context_timestep` (Self-Forcing).
        `noise_matched`: at each denoise step, what earlier chunks were at that step; no clean pass, a window for every
        step (StreamDiffusionV2). `cascaded`: step j sees the chunk before as it was at its step j + `cascade_offset`,
        the one before that at j + 2 `cascade_offset`, and so on up to clean (Block Cascading).
    denoising_steps, shift, warp_timesteps: text-to-video schedule. Warped, a step s means entry 1000 - s of the shifted
        table; else it is the timestep itself.
    video_input: whether streams may repaint an input video (loads the VAE's encoder).
    video_denoising_steps, video_shift: video-to-video schedule, never warped; the first entry only says how many steps
        there are, the noise controller replaces it chunk by chunk.
    video_noise_scale: noise injected into a first chunk, [0, 1]; the largest for a still scene.
    normalize_video_latent: False feeds the VAE's raw means, as StreamDiffusionV2's checkpoints expect.
    latent_frames_per_chunk; first_chunk_latent_frames: None = same as later chunks.
    window_frames: latent frames a chunk sees, sinks and itself included; -1 = all (global attention, at most
        `global_frames`). None = what the checkpoint says, else 21. sink_frames: first frames kept for ever.
    sink_position: `window` moves the sinks' rotary positions along, just before the oldest frame the chunk sees, so
        that no distance grows beyond the window; `absolute` leaves them where they were made (the original).
    sink_refresh_threshold: a frame that leaves the window replaces the sink it resembles least if their similarity is
        below this; None = sinks stay. Needs chunks of one frame.
    residual_dtype: `fp32` residual stream or the model's type (faster, less close).
    text_encoder_device: None = beside the transformer; `cpu` saves 10.6 GiB of device memory.
    vae_dtype: type of the VAE; None = the transformer's. decoder: `wan`, or `tiny` (TAEHV, `taew2_1.pth`; much
        cheaper, not exact).
    vae_frames_per_call: how many of a latent frame's 4 video frames decoder `wan` takes through its largest levels at a
        time; None = all, which is fastest, 1 needs half the memory beside its cache.
    sequence_parallel: use the tensor-parallel ranks for Ulysses sequence parallelism instead.
    recache_on_prompt_switch: recompute the window's keys and values under a new prompt (`strict` only).
    compile: fuse elementwise chains and the VAE's decoder with torch.compile. None = on CUDA, unless the engine runs
        with --enforce-eager.
    cuda_graphs: launch the forwards of a stream whose window is full as CUDA graphs, one set per place in the ring and
        kind of pass. For where the host cannot keep up: several GPUs, small models. Chunks in flight go without.
    """

    cache: CacheKind = "strict"
    cascade_offset: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    context_timestep: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    denoising_steps: list[float] = msgspec.field(default_factory=lambda: [1000.0, 750.0, 500.0, 250.0])
    shift: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    warp_timesteps: bool = True
    video_input: bool = True
    video_denoising_steps: list[float] = msgspec.field(default_factory=lambda: [700.0, 500.0, 400.0, 200.0])
    video_shift: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    video_noise_scale: Annotated[float, msgspec.Meta(gt=0.2, le=1)] = 0.8
    normalize_video_latent: bool = True
    latent_frames_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    first_chunk_latent_frames: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    window_frames: Annotated[int, msgspec.Meta(ge=-1, le=4096)] | None = None
    sink_frames: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    global_frames: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 21
    sink_position: Literal["window", "absolute"] = "window"
    sink_refresh_threshold: Annotated[float, msgspec.Meta(ge=-1, le=1)] | None = None
    residual_dtype: Literal["fp32", "model"] = "fp32"
    text_encoder_device: Literal["cpu"] | None = None
    vae_dtype: Literal["fp32", "bf16"] | None = None
    vae_frames_per_call: Annotated[int, msgspec.Meta(ge=1, le=4)] | None = None
    decoder: Literal["wan", "tiny"] = "wan"
    sequence_parallel: bool = False
    recache_on_prompt_switch: bool = False
    compile: bool | None = None
    cuda_graphs: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "CausalWanOptions":
        """Raises ValueError saying what arrived and what is allowed."""
        parsed = parse_options(cls, options, "omni.model")
        try:
            text, video = parsed.text_schedule(), parsed.video_schedule()
        except ValueError as error:
            raise ValueError(f"omni.model: {error}") from error
        lowest = lowest_first_timestep(parsed.video_noise_scale)
        if len(video.timesteps) > 1 and lowest <= video.timesteps[1]:
            raise ValueError(
                f"omni.model: video_noise_scale {parsed.video_noise_scale} can start a chunk at timestep {lowest}, not "
                f"above the second of video_denoising_steps, {video.timesteps[1]:g}"
            )
        if parsed.window_frames == 0:
            raise ValueError("omni.model: window_frames must be -1 (global) or >= 1, got 0")
        if parsed.cache != "strict" and parsed.recache_on_prompt_switch:
            raise ValueError(
                f"omni.model: recache_on_prompt_switch needs cache 'strict' (one window of clean frames), "
                f"got {parsed.cache!r}"
            )
        if parsed.cache != "strict" and text.num_steps != video.num_steps:
            raise ValueError(
                f"omni.model: cache {parsed.cache!r} keeps a window for every step; denoising_steps and "
                f"video_denoising_steps must be equally long, got {text.num_steps} and {video.num_steps}"
            )
        return parsed

    def text_schedule(self) -> FewStepSchedule:
        """The text-to-video schedule. Raises ValueError."""
        if not self.warp_timesteps:
            return nearest_schedule(self.shift, self.denoising_steps)
        indices = [1000 - step for step in self.denoising_steps]
        if any(index != int(index) for index in indices):
            raise ValueError(f"warped denoising_steps must be whole numbers, got {self.denoising_steps}")
        return few_step_schedule("exact", self.shift, [int(index) for index in indices])

    def video_schedule(self, first_timestep: float | None = None) -> FewStepSchedule:
        """The video-to-video schedule, begun at `first_timestep` (None = its own). Raises ValueError."""
        steps = self.video_denoising_steps
        return nearest_schedule(self.video_shift, steps if first_timestep is None else [first_timestep, *steps[1:]])

    def vae_torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, None: model_dtype}[self.vae_dtype]


class ChunkPlan(WanChunkPlan):
    """How a stream is cut into chunks and what each sees: architecture and options resolved."""

    @classmethod
    def resolve(cls, config: CausalWanConfig, options: CausalWanOptions) -> "ChunkPlan":
        """Options win over the checkpoint, the checkpoint over the defaults. Raises ValueError."""
        chunk = options.latent_frames_per_chunk or config.frames_per_chunk or _CHUNK
        first = options.first_chunk_latent_frames or chunk
        window = options.window_frames or config.window_frames or _WINDOW
        if window == -1:
            window = sink = options.global_frames
        else:
            sink = next(value for value in (options.sink_frames, config.sink_frames, _SINK) if value is not None)
            check_sliding(window, sink, chunk)
        if options.sink_refresh_threshold is not None and (chunk != 1 or not 0 < sink < window):
            raise ValueError(
                f"sink_refresh_threshold needs chunks of one latent frame and a sliding window with sinks, "
                f"got chunks of {chunk}, sink {sink}, window {window}"
            )
        return cls(first, chunk, window, sink)
