# SPDX-License-Identifier: Apache-2.0
"""What a LingBot-World checkpoint is (`LingBotWorldConfig`) and how it is served (`LingBotOptions`).

The architecture comes from the checkpoint and is checked key by key: an unknown key or a value this code does not
implement is an error, never a guess. The options come from `additional_config["omni"]["model"]`.
Held by tests/model_executor/models/lingbot_world/test_lingbot_config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import torch

from vllm_omni.model_executor.models.wan.architecture import (
    IGNORED,
    RENAMED,
    REQUIRED,
    ChunkTransformerConfig,
    read_architecture,
)
from vllm_omni.model_executor.models.wan.latents import LATENT_CHANNELS, VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.schedules import FewStepSchedule, few_step_schedule
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan, resolve_chunks
from vllm_omni.model_executor.streaming.options import StreamingOptions

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
class LingBotWorldConfig(ChunkTransformerConfig):
    """The causal transformer's architecture; the defaults are the released 18.5-billion-parameter model.

    The original's `local_attn_size = -1` is the code's default, not a recommendation: a live session has no last frame.
    """

    dim: int = 5120
    ffn_dim: int = 13824
    in_channels: int = 36
    num_heads: int = 40
    num_layers: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out_channels != LATENT_CHANNELS or self.in_channels != 2 * LATENT_CHANNELS + 4:
            raise ValueError(
                f"channels must be 36 in (16 noisy, 4 mask, 16 condition) and 16 out, "
                f"got {self.in_channels} and {self.out_channels}"
            )

    @property
    def condition_channels(self) -> int:
        """Channels of `y`: 4 mask + 16 image latent."""
        return self.in_channels - self.out_channels

    @property
    def camera_channels(self) -> int:
        """Channels of the camera map after the 8x8 space-to-depth."""
        return CAMERA_CHANNELS * VAE_SPATIAL * VAE_SPATIAL

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "LingBotWorldConfig":
        """Read a transformer `config.json` in either key style; an empty map means the released model.

        Raises ValueError naming unknown keys, and every value that this code does not implement.
        """
        states_window = values.get("sliding_window_num_frames") or values.get("local_attn_size", -1) != -1
        skipped = [] if states_window else ["sink_size"]
        if values.get("sliding_window_num_frames") or not states_window:
            skipped.append("local_attn_size")
        return cls(**read_architecture(values, RENAMED, _REQUIRED, (*IGNORED, *skipped), cls.num_heads, cls.dim))


_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": (
        "WanModel",
        "WanModelFast",
        "CausalLingBotWorldTransformer3DModel",
        "LingBotWorldTransformer3DModel",
    ),
    "model_type": ("i2v", "lingbot_world_fast", "lingbot_world"),
    "control_type": ("cam",),
    **REQUIRED,
}


class LingBotOptions(StreamingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`StreamingOptions`, and the choices on which the public implementations differ.

    version: `v1` (LingBot-World-Fast) or `v2` (LingBot-World 2.0 causal fast): same network, other defaults for
        `shift` (10 / 5), `denoise_indices`, `sink_frames` (9 / 6). None = the checkpoint's.
    schedule: `exact` float timesteps, or `original` integer timesteps with two sigmas a step.
    shift, denoise_indices: override the version's schedule.
    max_attention_frames: see only that many of the newest frames of the window (drops sinks first).
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
    decoder: `wan`, or `tiny` (TAEHV, `taew2_1.pth` in the checkpoint's directory; 25 times cheaper, not exact).
    vae_frames_per_call: how many of a latent frame's 4 video frames the decoder's largest levels take at a time. None =
        1 on CUDA, which halves what a decode needs beside its cache, and all on a CPU, which is faster.
    decode_before_clean_pass: make a chunk's frames before its clean-context pass, which then delays nobody, beside
        several GiB of camera terms that are still held then.
    reprime_on_prompt_switch: recompute the window's keys and values under a new prompt (one extra pass for every
        chunk in the window, and a second window buffer while that chunk runs).
    """

    version: Version | None = None
    schedule: Literal["exact", "original"] = "exact"
    shift: Annotated[float, msgspec.Meta(gt=0)] | None = None
    denoise_indices: list[int] | None = None
    max_attention_frames: Annotated[int, msgspec.Meta(ge=1)] | None = None
    camera_scale: Literal["constant", "chunk_max", "session_max"] = "constant"
    camera_translation_unit: Annotated[float, msgspec.Meta(gt=0)] = 0.05
    camera_first_frame: Literal["moves", "stands", "stands_each_chunk"] = "moves"
    camera_dtype: Literal["fp32", "bf16"] = "fp32"
    later_condition: LaterCondition = "streamed"
    condition_video_frames: Annotated[int, msgspec.Meta(ge=1, le=4097)] = 61
    vae_continuation: Literal["cache", "restart"] = "cache"
    prompt_switch: Literal["refresh", "ignore"] = "refresh"
    decoder: Literal["wan", "tiny"] = "wan"
    vae_frames_per_call: Annotated[int, msgspec.Meta(ge=1, le=4)] | None = None
    decode_before_clean_pass: bool = False
    reprime_on_prompt_switch: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, Any], checkpoint_version: Version = "v1") -> "LingBotOptions":
        """Raises ValueError saying what arrived and what is allowed."""
        parsed = cls.read({"version": checkpoint_version, **options})
        try:
            parsed.denoise_schedule()
        except ValueError as error:
            raise ValueError(f"omni.model: {error}") from error
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

    @property
    def replays_on_prompt_switch(self) -> bool:
        return self.reprime_on_prompt_switch


def resolve_plan(config: LingBotWorldConfig, options: LingBotOptions) -> ChunkPlan:
    """How a session is cut into chunks and what each sees. Raises ValueError."""
    return resolve_chunks(
        options,
        config,
        chunk_frames=3,
        window_frames=_WINDOW,
        sink_frames=_SINKS[options.version or "v1"],
        max_attention_frames=options.max_attention_frames,
    )
