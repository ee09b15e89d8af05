# SPDX-License-Identifier: Apache-2.0
"""The architecture of a DreamX-World-5B checkpoint (`DreamXConfig`) and its serving options
(`DreamXOptions`).

The architecture comes from the checkpoint's config or tensors. Unknown keys and unsupported values
are errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
import torch

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.wan.architecture import (
    IGNORED,
    RENAMED,
    REQUIRED,
    Trunk5BConfig,
    read_architecture,
)
from vllm_omni.model_executor.presets import Preset, PresetName
from vllm_omni.model_executor.schedules import (
    FewStepSchedule,
    few_step_schedule,
    nearest_schedule,
    with_most_steps,
)
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan, resolve_chunks
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.stream import StreamModelSetup

FPS: Final = 16.0
"""Training frame rate in frames per second."""
FOCAL_PIXELS: Final = 969.6969696969696
REFERENCE_SIZE: Final = (1920, 1080)
"""Frame size (width, height), in pixels, for which `FOCAL_PIXELS` gives the training videos' focal
length.
"""
GROUP: Final = 4
"""Number of channels in a group. Each group is multiplied by the camera's 4x4 matrix."""
_SHIFT: Final = 5.0
_WINDOW, _SINK, _CHUNK = 12, 3, 3


@dataclass(frozen=True)
class DreamXConfig(Trunk5BConfig):
    """Architecture of the causal transformer. The defaults describe the released model."""

    camera_compression: int = 4
    """Network width divided by the camera branch's width."""
    camera_blocks: tuple[int, ...] = tuple(range(30))
    """Indices of the layers that have a camera branch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.camera_compression or self.camera_dim % (GROUP * self.num_heads):
            raise ValueError(
                f"attn_compress {self.camera_compression} of dim {self.dim} must give "
                f"{self.num_heads} heads of a multiple of {GROUP} channels"
            )
        if any(layer not in range(self.num_layers) for layer in self.camera_blocks):
            raise ValueError(
                f"cam_self_attn_layers {list(self.camera_blocks)} must be among "
                f"{self.num_layers} layers"
            )

    @property
    def camera_dim(self) -> int:
        """Return the width of the camera branch."""
        return self.dim // self.camera_compression

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "DreamXConfig":
        """Read a transformer's `config.json`, with the keys of either layout. For an empty mapping,
        the released model's config is returned.

        Raises:
            ValueError: A key is unknown, or a value is not supported.
        """
        fields = read_architecture(values, _RENAMED, _REQUIRED, _IGNORED, cls.num_heads, cls.dim)
        blocks = fields.pop("camera_blocks", range(fields.get("num_layers", cls.num_layers)))
        return cls(**fields, camera_blocks=tuple(blocks))


_RENAMED = RENAMED | {
    "attn_compress": "camera_compression",
    "cam_self_attn_layers": "camera_blocks",
    "num_frame_per_block": "frames_per_chunk",
}
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": ("CausalWanModel", "WanModel", "DreamXWorldARTransformer3DModel"),
    "model_type": ("ti2v",),
    "cam_method": ("prope",),
    **REQUIRED,
}
_IGNORED = (
    *IGNORED,
    "add_control_adapter",
    "in_dim_control_adapter",
    "downscale_factor_control_adapter",
)
"""Keys that are ignored. The control adapter's keys have no effect, because this network has no
control adapter."""

PRESETS: Final[Mapping[PresetName, Preset]] = {
    "reference": Preset(),
    "balanced": Preset(quantization="fp8", kv_cache_dtype="fp8"),
    "realtime": Preset(
        model={"max_steps": 2, "decoder": "tiny"}, quantization="fp8", kv_cache_dtype="fp8"
    ),
    "small": Preset(
        model={"decoder": "tiny", "text_encoder_device": "cpu"},
        quantization="fp8",
        kv_cache_dtype="fp8",
    ),
}


class DreamXOptions(StreamingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`StreamingOptions` and the options specific to DreamX-World."""

    presets: ClassVar[Mapping[PresetName, Preset]] = PRESETS

    denoising_steps: list[int] = msgspec.field(default_factory=lambda: [1000, 750, 500, 250])
    """Denoise steps per chunk. Step s refers to entry 1000 - s of the timestep table with shift 5.
    """
    round_timesteps: bool | None = None
    """Whether timesteps are rounded to bf16 (1000, 936, 832, 624), as the original does on a GPU.
    The released videos were generated with rounded timesteps. False: exact timesteps are used.
    Default: true if `--dtype` is bfloat16.
    """
    context_timestep: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.1
    """Timestep of the context pass, which writes the keys and values for later chunks."""
    camera_reference: Literal["chunk", "start"] = "chunk"
    """Pose that a chunk's poses are relative to. `chunk`: the last pose of the previous chunk, as
    in the release. `start`: the session's start pose.
    """
    key_step: Annotated[float, msgspec.Meta(gt=0, le=100)] = 0.075
    """Movement per video frame while a movement key is held, in pose units."""
    key_degrees: Annotated[float, msgspec.Meta(gt=0, le=45)] = 1.5
    """Rotation per video frame while a look key is held, in degrees."""
    color_correction: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Strength of the frames' colour correction. 0 disables the correction. The `color_correction`
    request option overrides this value for one chunk.
    """

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "DreamXOptions":
        """Parse the options. If a value is invalid, the method raises a ValueError that contains
        the value and the allowed values.
        """
        parsed = cls.read_options(options)
        try:
            parsed.schedule(rounded=False)
        except ValueError as error:
            raise ValueError(f"omni.model: {error}") from error
        return parsed

    def rounds_timesteps(self, dtype: torch.dtype) -> bool:
        """Return whether timesteps are rounded for a network that has this dtype."""
        if self.round_timesteps is None:
            return dtype == torch.bfloat16
        return self.round_timesteps

    def schedule(self, *, rounded: bool) -> FewStepSchedule:
        """Return a chunk's denoise schedule. The level of the noise added between steps is never
        rounded.

        Raises:
            ValueError: A step is not in the timestep table.
        """
        exact = few_step_schedule(
            "exact", _SHIFT, [1000 - step for step in self.denoising_steps], np.float32
        )
        if rounded:
            steps = tuple(rounded_timestep(step) for step in exact.timesteps)
            near = nearest_schedule(_SHIFT, steps)
            exact = FewStepSchedule(steps, near.sigmas_x0, exact.sigmas_noise)
        return with_most_steps(exact, self.max_steps)


def rounded_timestep(timestep: float) -> float:
    """Return a timestep rounded to bf16."""
    return float(torch.tensor(timestep, dtype=torch.bfloat16, device="cpu"))


DreamXStream = StreamModelSetup[DreamXConfig, DreamXOptions]


def read_stream(checkpoint: Mapping[str, Any], omni: OmniConfig) -> DreamXStream:
    """Read the family's part of `hf_config` and the serving options. Raises ValueError if either is
    invalid.
    """
    options = DreamXOptions.parse(omni.model)
    config = DreamXConfig.from_checkpoint(checkpoint["transformer"])
    plan = resolve_chunks(
        options, config, chunk_frames=_CHUNK, window_frames=_WINDOW, sink_frames=_SINK
    )
    check_sinks(plan)
    few_steps = options.schedule(rounded=False).num_steps
    return StreamModelSetup(config, options, plan, few_steps)


def check_sinks(plan: ChunkPlan) -> None:
    """Raise ValueError if attention is not global and there are more sink frames than frames in the
    first chunk.

    In the original, the sink frames after the first chunk would retain keys and values computed
    from noisy latents.
    """
    if plan.first_chunk_frames < plan.sink_frames < plan.window_frames:
        raise ValueError(
            f"sink_frames is at most the length of the first chunk, {plan.first_chunk_frames} "
            f"latent frames, got {plan.sink_frames}"
        )
