# SPDX-License-Identifier: Apache-2.0
"""The architecture of a LingBot World checkpoint (`LingBotWorldConfig`) and its serving options
(`LingBotOptions`).

The architecture is read from the checkpoint. Unknown keys and unsupported values are errors. The
options are read from `additional_config["omni"]["model"]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import torch

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.wan.architecture import (
    IGNORED,
    RENAMED,
    REQUIRED,
    ChunkTransformerConfig,
    LaterCondition,
    read_architecture,
)
from vllm_omni.model_executor.models.wan.vae.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.presets import FP8_CHANNELS, Preset, PresetName
from vllm_omni.model_executor.schedules import (
    FewStepSchedule,
    few_step_schedule,
    with_most_steps,
)
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan, resolve_chunks
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.stream import StreamModelSetup

ControlType = Literal["cam", "act", "world"]
CONTROL_CHANNELS: Final[dict[ControlType, int]] = {"cam": 6, "act": 7, "world": 6}
"""Number of control map channels at pixel resolution, keyed by control type. For `cam` and `world`,
the channels are the ray origin and direction. For `act`, they are the ray direction and the keys w
a s d. A `world` model also receives the camera's world pose (`world_pose.py`).
"""
NATIVE_HEIGHT, NATIVE_WIDTH = 480, 832
"""Height and width, in pixels, of the image that a client's intrinsics refer to."""
ACTION_FOCAL = 500.0
"""Focal length in output pixels for requests that contain actions but no intrinsics."""

Version = Literal["v1", "v2"]

DENOISE_INDICES: dict[Version, tuple[int, ...]] = {
    "v1": (0, 179, 358, 679),
    "v2": (0, 250, 500, 750),
}
_SHIFTS: dict[Version, float] = {"v1": 10.0, "v2": 5.0}
_SINKS: dict[Version, int] = {"v1": 9, "v2": 6}
_WINDOW = 18


@dataclass(frozen=True)
class LingBotWorldConfig(ChunkTransformerConfig):
    """Architecture of the causal transformer. The defaults describe the released model with 18.5
    billion parameters.

    The original code defaults to global attention (`local_attn_size = -1`). This package does not,
    because a live session's length is unlimited.
    """

    dim: int = 5120
    """Width of the network."""
    ffn_dim: int = 13824
    """Width of the feed-forward layers."""
    in_channels: int = 36
    """Number of input channels."""
    num_heads: int = 40
    """Number of attention heads."""
    num_layers: int = 40
    """Number of transformer blocks."""
    control_type: ControlType = "cam"
    """Control input: camera rays (`cam`), rays and keys (`act`), or rays and world pose (`world`).
    """
    world_period_m: float | None = None
    """Distance in metres after which the world of a `world` model repeats.

    Required for control type `world`, and refused for any other type.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.control_type == "world") != (self.world_period_m is not None):
            raise ValueError(
                "world_period_m must be set for control_type 'world' and for no other, "
                f"got {self.world_period_m} with {self.control_type!r}"
            )
        if self.world_period_m is not None and not 0 < self.world_period_m < float("inf"):
            raise ValueError(f"world_period_m must be finite and > 0, got {self.world_period_m}")
        if self.out_channels != LATENT_CHANNELS or self.in_channels != 2 * LATENT_CHANNELS + 4:
            raise ValueError(
                f"channels must be 36 in (16 noisy, 4 mask, 16 condition) and 16 out, "
                f"got {self.in_channels} and {self.out_channels}"
            )

    @property
    def camera_channels(self) -> int:
        """Return the number of control map channels after the 8x8 space-to-depth operation."""
        return CONTROL_CHANNELS[self.control_type] * VAE_SPATIAL * VAE_SPATIAL

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "LingBotWorldConfig":
        """Read a transformer's `config.json`, with the original or the diffusers keys. An empty
        mapping stands for the released model.

        Raises:
            ValueError: A key is unknown, or a value is not supported.
        """
        states_window = (
            values.get("sliding_window_num_frames") or values.get("local_attn_size", -1) != -1
        )
        skipped = [] if states_window else ["sink_size"]
        if values.get("sliding_window_num_frames") or not states_window:
            skipped.append("local_attn_size")
        return cls(
            **read_architecture(
                values, _RENAMED, _REQUIRED, (*IGNORED, *skipped), cls.num_heads, cls.dim
            )
        )


_RENAMED = {**RENAMED, "control_type": "control_type", "world_period_m": "world_period_m"}
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": (
        "WanModel",
        "WanModelFast",
        "WanModelCausal",
        "CausalLingBotWorldTransformer3DModel",
        "LingBotWorldTransformer3DModel",
    ),
    "model_type": ("i2v", "lingbot_world_fast", "lingbot_world"),
    "control_type": tuple(CONTROL_CHANNELS),
    **REQUIRED,
}


@dataclass(frozen=True)
class LingBotChoices:
    """Settings that differ between the public implementations of LingBot World."""

    schedule: Literal["exact", "original"] = "exact"
    """Denoise timesteps: floats (`exact`), or integers with two sigmas per step (`original`)."""
    residual_dtype: Literal["fp32", "model"] = "fp32"
    """Dtype of the residual stream: fp32 (`fp32`), or the model's dtype (`model`: faster, less
    accurate)."""
    camera_first_frame: Literal["moves", "stands", "stands_each_chunk"] = "moves"
    """Motion of the first latent frame. If the client sends actions, a session's first frame either
    moves by its own action (`moves`) or stands still as the reference for later frames (`stands`,
    as in SGLang). With `stands_each_chunk`, the first frame of every chunk stands still, even if
    the client sends poses, as in PR 3701's extensions.
    """
    camera_scale: Literal["constant", "chunk_max", "session_max"] = "constant"
    """Divisor of camera translations: `camera.MOVE_UNIT` (`constant`), the largest translation in
    the chunk (`chunk_max`), or the largest translation in the session so far (`session_max`). A
    request's `camera_scale` option overrides this setting.
    """
    camera_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the camera map. `fp32`: poses and rays are computed in fp64 and rounded once.
    `bf16`: poses are rounded to bf16, and relative poses and rays are computed in bf16, as in
    SGLang 0.5.23.
    """
    later_condition: LaterCondition = "streamed"
    """Conditioning of the chunks after the first; see `LaterCondition`."""
    vae_continuation: Literal["cache", "restart"] = "cache"
    """How the VAE decoder starts a chunk: with the cache from the previous chunk (`cache`), or with
    an empty cache, two latent frames before the chunk (`restart`).
    """
    prompt_switch: Literal["refresh", "ignore"] = "refresh"
    """Effect of a new prompt after the first chunk: it applies to the next chunk (`refresh`), or it
    is ignored (`ignore`).
    """

    @property
    def camera_torch_dtype(self) -> torch.dtype:
        """Return the dtype used to convert poses to rays. The control map is always fp32."""
        return {"fp32": torch.float64, "bf16": torch.bfloat16}[self.camera_dtype]


Convention = Literal["realtime", "original", "sglang", "pr3701"]

CONVENTIONS: Final[dict[Convention, LingBotChoices]] = {
    "realtime": LingBotChoices(),
    "original": LingBotChoices(schedule="original"),
    "sglang": LingBotChoices(
        residual_dtype="model",
        camera_first_frame="stands",
        camera_scale="session_max",
        camera_dtype="bf16",
        later_condition="second_chunk",
    ),
    "pr3701": LingBotChoices(
        schedule="original",
        camera_first_frame="stands_each_chunk",
        camera_scale="chunk_max",
        later_condition="fresh_grey",
        vae_continuation="restart",
        prompt_switch="ignore",
    ),
}


PRESETS: Final[Mapping[PresetName, Preset]] = {
    "reference": Preset(),
    "balanced": Preset(quantization="fp8", quantized_channels=FP8_CHANNELS, kv_cache_dtype="fp8"),
    "realtime": Preset(
        model={
            "max_steps": 2,
            "context_kv": "last_step",
            "window_frames": 15,
            "sink_frames": 3,
            "decoder": "tiny",
            "cuda_graphs": True,  # so that a slow host does not delay first frames
        },
        quantization="fp8",
        quantized_channels=FP8_CHANNELS,
        kv_cache_dtype="fp8",
    ),
    "small": Preset(
        model={"decoder": "tiny", "text_encoder_device": "cpu"},
        quantization="fp8",
        kv_cache_dtype="fp8",
    ),
}


class LingBotOptions(StreamingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options for LingBot World: the fields of `StreamingOptions` and those defined
    here.
    """

    presets: ClassVar[Mapping[PresetName, Preset]] = PRESETS

    version: Version | None = None
    """Model version: `v1` (LingBot-World-Fast) or `v2` (LingBot-World 2.0 causal fast). The
    versions have different defaults for `shift` (10 / 5), `denoise_indices` and `sink_frames` (9 /
    6). Default: the checkpoint's version.
    """
    convention: Convention = "realtime"
    """Public implementation to follow where the implementations differ: `realtime` (the default,
    for interactive sessions), `original` (the released code), `sglang` (SGLang) or `pr3701`
    (vLLM-Omni's pull request 3701). The model's README lists the differences.
    """
    shift: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Shift of the noise schedule, greater than 0. Default: the value for the model's version."""
    denoise_indices: list[int] | None = None
    """Denoise steps, as increasing indices into the noise schedule. Default: the steps for the
    model's version."""

    @classmethod
    def parse(
        cls, options: Mapping[str, Any], checkpoint_version: Version = "v1"
    ) -> "LingBotOptions":
        """Parse the options.

        Raises:
            ValueError: An option is invalid. The message contains its value and the allowed values.
        """
        parsed = cls.read_options({"version": checkpoint_version, **options})
        try:
            parsed.denoise_schedule()
        except ValueError as error:
            raise ValueError(f"omni.model: {error}") from error
        choices = parsed.choices
        if parsed.decoder == "tiny" and choices.vae_continuation == "restart":
            raise ValueError(
                f"omni.model: convention {parsed.convention!r} restarts decoder 'wan' at each "
                "chunk, got 'tiny'"
            )
        return parsed

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Mapping[str, Any], options: Mapping[str, Any]
    ) -> "LingBotOptions":
        """Parse the options in `omni.model` for a checkpoint described by `hf_config`.

        For the model before distillation (`mode: pretrain`), attention is global if `window_frames`
        is not set.

        Raises:
            ValueError: An option is invalid.
        """
        parsed = cls.parse(options, checkpoint["version"])
        if checkpoint["mode"] == "fast":
            return parsed
        for name in ("denoise_indices", "max_steps", "first_chunk_steps"):
            if getattr(parsed, name) is not None:
                given = name if name in options else f"{name} of preset {parsed.preset!r}"
                raise ValueError(
                    f"omni.model: {given} applies to distilled models; this one has 40 UniPC steps"
                )
        return (
            parsed
            if parsed.window_frames is not None
            else msgspec.structs.replace(parsed, window_frames=-1)
        )

    @property
    def resolved_shift(self) -> float:
        return _SHIFTS[self.version or "v1"] if self.shift is None else self.shift

    def denoise_schedule(self) -> FewStepSchedule:
        shift = self.resolved_shift
        indices = (
            DENOISE_INDICES[self.version or "v1"]
            if self.denoise_indices is None
            else self.denoise_indices
        )
        schedule = few_step_schedule(self.choices.schedule, shift, indices)
        return with_most_steps(schedule, self.max_steps)

    @property
    def choices(self) -> LingBotChoices:
        return CONVENTIONS[self.convention]


def resolve_plan(config: LingBotWorldConfig, options: LingBotOptions) -> ChunkPlan:
    """Return a session's chunk sizes and K/V window size.

    Raises:
        ValueError: The options are not valid for this model.
    """
    return resolve_chunks(
        options,
        config,
        chunk_frames=3,
        window_frames=_WINDOW,
        sink_frames=_SINKS[options.version or "v1"],
    )


LingBotStream = StreamModelSetup[LingBotWorldConfig, LingBotOptions]


def read_stream(checkpoint: Mapping[str, Any], omni: OmniConfig) -> LingBotStream:
    """Return a checkpoint's architecture, serving options and chunk plan.

    Args:
        checkpoint: The family's section of `hf_config`.
        omni: The server's configuration.

    Raises:
        ValueError: An option or the architecture is invalid.
    """
    options = LingBotOptions.of_checkpoint(checkpoint, omni.model)
    config = LingBotWorldConfig.from_checkpoint(checkpoint["transformer"])
    few_steps = options.denoise_schedule().num_steps if checkpoint["mode"] == "fast" else None
    return StreamModelSetup(config, options, resolve_plan(config, options), few_steps)
