# SPDX-License-Identifier: Apache-2.0
"""What a LingBot-World checkpoint is (`LingBotWorldConfig`) and how it is served (`LingBotOptions`).

The architecture comes from the checkpoint and is checked key by key: an unknown key or a value this code does not
implement is an error, never a guess. The options come from `additional_config["omni"]["model"]`.
Held by tests/model_executor/models/lingbot_world/test_lingbot_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
import torch

from vllm_omni.config import parse_options
from vllm_omni.model_executor.models.wan.architecture import read_architecture
from vllm_omni.model_executor.models.wan.chunk_plan import VAE_SPATIAL, VAE_TEMPORAL, WanChunkPlan, check_sliding
from vllm_omni.model_executor.schedules import FewStepSchedule, few_step_schedule

LATENT_CHANNELS = 16
CAMERA_CHANNELS = 6
NATIVE_HEIGHT, NATIVE_WIDTH = 480, 832
"""The size camera intrinsics are expressed for."""
ACTION_FOCAL = 500.0
"""Focal length in pixels of the output, when actions come without intrinsics."""

Version = Literal["v1", "v2"]

LaterCondition = Literal["streamed", "second_chunk", "last_frame", "fresh_grey"]
"""What chunks after the image's are conditioned on, F latent frames each:

- `streamed`: what the whole clip's encoding has there (the original, vLLM-Omni);
- `second_chunk`: the second chunk's, again and again (SGLang);
- `last_frame`: as streamed for so many video frames, then the last latent frame again and again (SGLang's lazy encode);
- `fresh_grey`: 1 + 4 F grey frames encoded as a clip of their own, without its first latent (PR 3701's extension).
"""

DENOISE_INDICES: dict[Version, tuple[int, ...]] = {"v1": (0, 179, 358, 679), "v2": (0, 250, 500, 750)}
_SHIFTS: dict[Version, float] = {"v1": 10.0, "v2": 5.0}
_SINKS: dict[Version, int] = {"v1": 9, "v2": 6}
_WINDOW = 18


@dataclass(frozen=True)
class LingBotWorldConfig:
    """The causal transformer's architecture; the defaults are the released 18.5-billion-parameter model.

    window_frames, sink_frames: what the checkpoint recommends; None = it names no window (the original's
    `local_attn_size = -1` is the code's default, not a recommendation: a live session has no last frame).
    """

    dim: int = 5120
    ffn_dim: int = 13824
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    in_channels: int = 36
    out_channels: int = 16
    num_heads: int = 40
    num_layers: int = 40
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
        if self.out_channels != LATENT_CHANNELS or self.in_channels != 2 * LATENT_CHANNELS + 4:
            raise ValueError(
                f"channels must be 36 in (16 noisy, 4 mask, 16 condition) and 16 out, "
                f"got {self.in_channels} and {self.out_channels}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def condition_channels(self) -> int:
        """Channels of `y`: 4 mask + 16 image latent."""
        return self.in_channels - self.out_channels

    @property
    def camera_channels(self) -> int:
        """Channels of the camera map after the 8x8 space-to-depth."""
        return CAMERA_CHANNELS * VAE_SPATIAL * VAE_SPATIAL

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Pixel size -> latent size. Raises ValueError unless both are multiples of 16."""
        multiple = VAE_SPATIAL * self.patch_size[1]
        if height % multiple or width % multiple or min(height, width) < multiple:
            raise ValueError(f"height and width must be multiples of {multiple} pixels, got {height}x{width}")
        return height // VAE_SPATIAL, width // VAE_SPATIAL

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "LingBotWorldConfig":
        """Read a transformer `config.json` in either key style; an empty map means the released model.

        Raises ValueError naming unknown keys, and every value that this code does not implement.
        """
        states_window = values.get("sliding_window_num_frames") or values.get("local_attn_size", -1) != -1
        skipped = [] if states_window else ["sink_size"]
        if values.get("sliding_window_num_frames") or not states_window:
            skipped.append("local_attn_size")
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
    "num_frames_per_block": "frames_per_chunk",
}
"""Checkpoint key -> field, original style and diffusers style."""

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": (
        "WanModel",
        "WanModelFast",
        "CausalLingBotWorldTransformer3DModel",
        "LingBotWorldTransformer3DModel",
    ),
    "model_type": ("i2v", "lingbot_world_fast", "lingbot_world"),
    "control_type": ("cam",),
    "qk_norm": (True, "rms_norm_across_heads"),
    "cross_attn_norm": (True,),
    "image_dim": (None,),
    "added_kv_proj_dim": (None,),
    "pos_embed_seq_len": (None,),
    "window_size": ([-1, -1], (-1, -1)),
}
"""Keys whose value must be one that the code implements."""

_IGNORED = ("_diffusers_version", "_name_or_path", "rope_max_seq_len", "architectures", "torch_dtype", "dtype")
"""Keys that change nothing here (rotations are computed, so there is no longest sequence)."""


class LingBotOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options; each is one of the choices on which the public implementations differ.

    version: `v1` (LingBot-World-Fast) or `v2` (LingBot-World 2.0 causal fast): same network, other defaults for
        `shift` (10 / 5), `denoise_indices`, `sink_frames` (9 / 6). None = the checkpoint's.
    schedule: `exact` float timesteps, or `original` integer timesteps with two sigmas a step.
    shift, denoise_indices: override the version's schedule.
    latent_frames_per_chunk; first_chunk_latent_frames: None = same as later chunks.
    window_frames: latent frames a chunk sees, sinks and itself included; -1 = all (global attention, at most
        `global_frames`). None = what the checkpoint says, else 18. sink_frames: first frames kept for ever.
    max_attention_frames: see only that many of the newest frames of the window (drops sinks first).
    residual_dtype: `fp32` residual stream (original) or the model's type (faster, less close).
    camera_scale: `constant` divides camera translations by `camera_translation_unit` (interactive), `chunk_max` by
        the chunk's largest one, `session_max` by the session's largest so far. A request's option `camera_scale`
        overrides all.
    camera_first_frame: with actions, a session's first latent frame `moves` by its own action, or only gives the later
        ones their reference and `stands` still (SGLang); with `stands_each_chunk` every chunk's first does, under
        poses as well (PR 3701's extension).
    camera_dtype: `fp32` = poses and rays in fp64, rounded once; `bf16` = all of it in bf16 (SGLang 0.5.23).
    later_condition: what later chunks are conditioned on (`LaterCondition`). condition_video_frames: how many
        frames `last_frame` encodes, the image included.
    vae_continuation: the decoder goes on from its `cache`, or begins again two latent frames early at each chunk
        (`restart`).
    prompt_switch: a new prompt takes effect from the next chunk on, or is ignored after a session's first chunk.
    text_encoder_device: None = beside the transformer; `cpu` saves 10.6 GiB of device memory.
    decoder: `wan`, or `tiny` (TAEHV, `taew2_1.pth` in the checkpoint's directory; 25 times cheaper, not exact).
    vae_dtype: type of the VAE's decoder and encoder; None = the transformer's (the original uses fp32).
    vae_frames_per_call: how many of a latent frame's 4 video frames the decoder's largest levels take at a time. None =
        1 on CUDA, which halves what a decode needs beside its cache, and all on a CPU, which is faster.
    decode_before_clean_pass: make a chunk's frames before its clean-context pass, which then delays nobody (345 of 2006
        ms on an H200), beside several GiB of camera terms that are still held then.
    sequence_parallel: use the tensor-parallel ranks for Ulysses sequence parallelism instead.
    reprime_on_prompt_switch: recompute the window's keys and values under a new prompt (one extra pass for every
        chunk in the window, and a second window buffer while that chunk runs).
    compile: fuse elementwise chains and the VAE's decoder with torch.compile, for every video size when it is first
        seen (the largest at start). None = on CUDA, unless the engine runs with --enforce-eager.
    cuda_graphs: launch the forwards of a session whose window is full as CUDA graphs, one set per place in the ring and
        kind of pass. For where the host cannot keep up: ranks that share layers. Holds a chunk's camera
        terms twice.
    """

    version: Version | None = None
    schedule: Literal["exact", "original"] = "exact"
    shift: Annotated[float, msgspec.Meta(gt=0)] | None = None
    denoise_indices: list[int] | None = None
    latent_frames_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    first_chunk_latent_frames: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    window_frames: Annotated[int, msgspec.Meta(ge=-1, le=4096)] | None = None
    sink_frames: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    global_frames: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 21
    max_attention_frames: Annotated[int, msgspec.Meta(ge=1)] | None = None
    residual_dtype: Literal["fp32", "model"] = "fp32"
    camera_scale: Literal["constant", "chunk_max", "session_max"] = "constant"
    camera_translation_unit: Annotated[float, msgspec.Meta(gt=0)] = 0.05
    camera_first_frame: Literal["moves", "stands", "stands_each_chunk"] = "moves"
    camera_dtype: Literal["fp32", "bf16"] = "fp32"
    later_condition: LaterCondition = "streamed"
    condition_video_frames: Annotated[int, msgspec.Meta(ge=1, le=4097)] = 61
    vae_continuation: Literal["cache", "restart"] = "cache"
    prompt_switch: Literal["refresh", "ignore"] = "refresh"
    text_encoder_device: Literal["cpu"] | None = None
    vae_dtype: Literal["fp32", "bf16"] | None = None
    decoder: Literal["wan", "tiny"] = "wan"
    vae_frames_per_call: Annotated[int, msgspec.Meta(ge=1, le=4)] | None = None
    decode_before_clean_pass: bool = False
    sequence_parallel: bool = False
    reprime_on_prompt_switch: bool = False
    compile: bool | None = None
    cuda_graphs: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, Any], checkpoint_version: Version = "v1") -> "LingBotOptions":
        """Raises ValueError saying what arrived and what is allowed."""
        parsed = parse_options(cls, {"version": checkpoint_version, **options}, "omni.model")
        try:
            parsed.denoise_schedule()
        except ValueError as error:
            raise ValueError(f"omni.model: {error}") from error
        if parsed.window_frames == 0:
            raise ValueError("omni.model: window_frames must be -1 (global) or >= 1, got 0")
        if (parsed.condition_video_frames - 1) % VAE_TEMPORAL:
            raise ValueError(
                f"omni.model: condition_video_frames must be 1 + a multiple of {VAE_TEMPORAL}, "
                f"got {parsed.condition_video_frames}"
            )
        if parsed.decoder == "tiny" and parsed.vae_continuation == "restart":
            raise ValueError("omni.model: vae_continuation 'restart' is of decoder 'wan'; decoder 'tiny' keeps little")
        if parsed.prompt_switch == "ignore" and parsed.reprime_on_prompt_switch:
            raise ValueError("omni.model: reprime_on_prompt_switch needs prompt_switch 'refresh', got 'ignore'")
        return parsed

    def denoise_schedule(self) -> FewStepSchedule:
        shift = _SHIFTS[self.version or "v1"] if self.shift is None else self.shift
        indices = DENOISE_INDICES[self.version or "v1"] if self.denoise_indices is None else self.denoise_indices
        return few_step_schedule(self.schedule, shift, indices)

    @property
    def camera_torch_dtype(self) -> torch.dtype:
        """The type in which poses become rays; what comes out is fp32 in any case."""
        return {"fp32": torch.float64, "bf16": torch.bfloat16}[self.camera_dtype]

    def vae_torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, None: model_dtype}[self.vae_dtype]


class ChunkPlan(WanChunkPlan):
    """How a session is cut into chunks and what each sees: architecture and options resolved."""

    @classmethod
    def resolve(cls, config: LingBotWorldConfig, options: LingBotOptions) -> "ChunkPlan":
        """Options win over the checkpoint, the checkpoint over the version's defaults. Raises ValueError."""
        chunk = _first_set(options.latent_frames_per_chunk, config.frames_per_chunk, 3)
        first = _first_set(options.first_chunk_latent_frames, chunk)
        window = _first_set(options.window_frames, config.window_frames, _WINDOW)
        if window == -1:
            window = sink = options.global_frames
        else:
            sink = _first_set(options.sink_frames, config.sink_frames, _SINKS[options.version or "v1"])
            check_sliding(window, sink, chunk)
        return cls(first, chunk, window, sink, options.max_attention_frames)


def _first_set(*values: int | None) -> int:
    return cast(int, next(value for value in values if value is not None))
