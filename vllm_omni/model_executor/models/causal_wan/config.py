# SPDX-License-Identifier: Apache-2.0
"""The architecture of a causal Wan 2.1 checkpoint (`CausalWanConfig`) and its serving options
(`CausalWanOptions`).

The architecture comes from the checkpoint and is validated key by key. The options come from
`additional_config["omni"]["model"]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.causal_wan.checkpoint.releases import (
    OTHER,
    PublishedNetwork,
    release_named,
)
from vllm_omni.model_executor.models.causal_wan.motion import lowest_first_timestep
from vllm_omni.model_executor.models.wan.architecture import (
    IGNORED,
    RENAMED,
    REQUIRED,
    ChunkTransformerConfig,
    read_architecture,
)
from vllm_omni.model_executor.models.wan.vae.latents import LATENT_CHANNELS
from vllm_omni.model_executor.presets import FP8_CHANNELS, Preset, PresetName
from vllm_omni.model_executor.schedules import (
    FewStepSchedule,
    few_step_schedule,
    nearest_schedule,
    with_most_steps,
)
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan, resolve_chunks
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.stream import StreamModelSetup

_VIDEO_SHIFT = 8.0
"""Timestep shift for the video-to-video schedule, as in training."""
VIDEO_NOISE_SCALE = 0.8
"""Noise scale for an input video's first chunk, in [0, 1]. If the scene is static, later chunks use
the same scale.
"""

_WINDOW, _SINK, _CHUNK = 21, 3, 3
"""Default sizes in latent frames for a checkpoint that does not specify a window. The window is as
long as a training clip, and the number of sink frames equals the chunk size.
"""

CacheKind = Literal["strict", "noise_matched"]
PromptSwitch = Literal["keep", "recompute"]


@dataclass(frozen=True)
class CausalWanConfig(ChunkTransformerConfig):
    """The transformer's architecture. The defaults describe the 1.3B model."""

    dim: int = 1536
    """Width of the network."""
    ffn_dim: int = 8960
    """Width of the feed-forward layers."""
    in_channels: int = LATENT_CHANNELS
    """Number of input channels."""
    num_heads: int = 12
    """Number of attention heads."""
    num_layers: int = 30
    """Number of transformer blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.in_channels, self.out_channels) != (LATENT_CHANNELS, LATENT_CHANNELS):
            raise ValueError(
                f"this is the text-to-video network: channels must be {LATENT_CHANNELS} in "
                "and out, "
                f"got {self.in_channels} and {self.out_channels}"
            )

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "CausalWanConfig":
        """Read a transformer's `config.json` in either key style. For an empty mapping, the 1.3B
        model's config is returned.

        If keys are unknown or values are unsupported, the method raises a ValueError that names all
        of them.
        """
        slides = values.get("local_attn_size", -1) != -1
        skipped = () if slides else ("local_attn_size", "sink_size")
        return cls(
            **read_architecture(
                values, _RENAMED, _REQUIRED, (*_IGNORED, *skipped), cls.num_heads, cls.dim
            )
        )


_RENAMED = {**RENAMED, "num_frame_per_block": "frames_per_chunk"}


def with_settings(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in a `config.json`, plus the `settings` for keys that it lacks in both key
    styles.
    """
    stated = {_RENAMED.get(key, key) for key, value in stored.items() if value is not None}
    return {
        **{key: value for key, value in settings.items() if _RENAMED.get(key, key) not in stated},
        **stored,
    }


CLASSES = ("CausalWanModel", "CausalWanTransformer3DModel", "WanModel", "WanTransformer3DModel")

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": CLASSES,
    "model_type": ("t2v",),
    **REQUIRED,
    "independent_first_frame": (False,),
}

_IGNORED = (*IGNORED, "latent_hw", "rope_cache_policy")


PRESETS: Final[Mapping[PresetName, Preset]] = {
    "reference": Preset(),
    "balanced": Preset(quantization="fp8", quantized_channels=FP8_CHANNELS, kv_cache_dtype="fp8"),
    "realtime": Preset(
        model={"max_steps": 2, "decoder": "tiny"},
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
"""The presets do not set a window, because the releases have different windows (6 to 21 frames).
Every preset uses the release's window.
"""


class CausalWanOptions(StreamingOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`StreamingOptions`, and options for details that public implementations handle
    differently.
    """

    presets: ClassVar[Mapping[PresetName, Preset]] = PRESETS

    cache: CacheKind = "strict"
    """Which of the earlier chunks' K/V a chunk attends to. `strict`: a chunk attends to the K/V of
    clean chunks, written by a clean-context pass at timestep 0 (Self-Forcing). `noise_matched`: at
    each denoise step, a chunk attends to the K/V that earlier chunks wrote at the same step. This
    mode uses one window per step and no clean-context pass (StreamDiffusionV2).
    """
    denoising_steps: list[float] = msgspec.field(
        default_factory=lambda: [1000.0, 750.0, 500.0, 250.0]
    )
    """Text-to-video schedule. Step s refers to entry 1000 - s of the timestep table with shift 5. A
    release trained with other steps has its own default, and its steps are interpreted as its own
    code interprets them. For example, CausVid's steps are timesteps.
    """
    video_input: bool = True
    """Whether streams can repaint an input video or start from an image. If so, the VAE encoder is
    loaded."""
    video_denoising_steps: list[float] = msgspec.field(
        default_factory=lambda: [700.0, 500.0, 400.0, 200.0]
    )
    """Video-to-video schedule, as a list of timesteps. The noise controller replaces each chunk's
    first timestep.
    """
    normalize_video_latent: bool = True
    """Whether the latents of an input video are normalised. False: the VAE's raw means are used, as
    StreamDiffusionV2's checkpoints expect."""
    sink_position: Literal["window", "absolute"] = "window"
    """Rotary positions of sink frames. `window`: sink frames move to the positions just before the
    oldest frame that the chunk attends to, so no distance exceeds the window. `absolute`: their
    positions do not change, as in the original.
    """
    sink_refresh_threshold: Annotated[float, msgspec.Meta(ge=-1, le=1)] | None = None
    """Similarity threshold in [-1, 1]. When a frame leaves the window and its similarity to the
    least similar sink frame is below this threshold, it replaces that sink frame. Requires chunks
    of one frame. None: sink frames are never replaced.
    """
    prompt_switch: PromptSwitch = "keep"
    """What happens to the earlier frames' K/V when a chunk has a new prompt. `keep`: the K/V do not
    change. `recompute`: a clean-context pass for each chunk in the window recomputes the window's
    K/V with the new prompt (LongLive's KV recache). Sink frames are recomputed until the window has
    moved away from them. Requires `cache: strict`.
    """

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Mapping[str, Any], options: Mapping[str, Any]
    ) -> "CausalWanOptions":
        """Parse `omni.model` for a checkpoint described by `hf_config`, with its release's settings
        as defaults.

        The method raises ValueError under the same conditions as `parse`.
        """
        return cls.parse(options, release_named(checkpoint["release"]).options)

    @classmethod
    def parse(
        cls, options: Mapping[str, Any], release: Mapping[str, Any] | None = None
    ) -> "CausalWanOptions":
        """Parse the options, with the release's options as defaults.

        If an option is invalid, the method raises a ValueError that contains the value and the
        allowed values.
        """
        parsed = cls.read_options(options, release)
        try:
            text, video = parsed.text_schedule(), parsed.video_schedule()
        except ValueError as error:
            raise ValueError(f"omni.model: {error}") from error
        lowest = lowest_first_timestep(VIDEO_NOISE_SCALE)
        if len(video.timesteps) > 1 and lowest <= video.timesteps[1]:
            raise ValueError(
                f"omni.model: a chunk can start at timestep {lowest}, not above the second of "
                "video_denoising_steps, "
                f"{video.timesteps[1]:g}"
            )
        if parsed.cache != "strict" and parsed.prompt_switch == "recompute":
            raise ValueError(
                f"omni.model: prompt_switch 'recompute' needs cache 'strict', got {parsed.cache!r}"
            )
        if parsed.cache != "strict" and parsed.context_kv != "clean_pass":
            raise ValueError(
                f"omni.model: context_kv {parsed.context_kv!r} needs cache 'strict', "
                f"got {parsed.cache!r}"
            )
        if parsed.cache != "strict" and parsed.first_chunk_steps is not None:
            raise ValueError(
                f"omni.model: first_chunk_steps needs cache 'strict', because cache "
                f"{parsed.cache!r} keeps a window for every step"
            )
        if parsed.cache != "strict" and text.num_steps != video.num_steps:
            raise ValueError(
                f"omni.model: cache {parsed.cache!r} keeps a window for every step; "
                "denoising_steps and "
                f"video_denoising_steps must be equally long, got {text.num_steps} and "
                f"{video.num_steps}"
            )
        return parsed

    def text_schedule(self, release: PublishedNetwork = OTHER) -> FewStepSchedule:
        """Return the text-to-video schedule, with the timesteps and sigmas that `release` was
        trained with. Any number of steps is allowed.

        Raises ValueError if the steps are invalid.
        """
        if not release.warps_steps:
            schedule = nearest_schedule(release.shift, self.denoising_steps)
            return with_most_steps(schedule, self.max_steps)
        indices = [1000 - step for step in self.denoising_steps]
        if any(index != int(index) for index in indices):
            raise ValueError(f"denoising_steps must be whole numbers, got {self.denoising_steps}")
        schedule = few_step_schedule("exact", release.shift, [int(index) for index in indices])
        return with_most_steps(schedule, self.max_steps)

    def video_schedule(self, first_timestep: float | None = None) -> FewStepSchedule:
        """Return the video-to-video schedule, starting at `first_timestep`. Default: the option's
        first timestep. Raises ValueError if the schedule is invalid.
        """
        steps = self.video_denoising_steps
        schedule = nearest_schedule(
            _VIDEO_SHIFT, steps if first_timestep is None else [first_timestep, *steps[1:]]
        )
        return with_most_steps(schedule, self.max_steps)


def resolve_plan(config: CausalWanConfig, options: CausalWanOptions) -> ChunkPlan:
    """Return a stream's chunk sizes and K/V window size. Raises ValueError if the sizes are
    incompatible with each other.
    """
    plan = resolve_chunks(
        options, config, chunk_frames=_CHUNK, window_frames=_WINDOW, sink_frames=_SINK
    )
    chunk, window, sink = plan.chunk_frames, plan.window_frames, plan.sink_frames
    if options.sink_refresh_threshold is not None and (chunk != 1 or not 0 < sink < window):
        raise ValueError(
            "sink_refresh_threshold needs chunks of one latent frame and a sliding window "
            "with sinks, "
            f"got chunks of {chunk}, sink {sink}, window {window}"
        )
    return plan


CausalWanStream = StreamModelSetup[CausalWanConfig, CausalWanOptions]


def read_stream(checkpoint: Mapping[str, Any], omni: OmniConfig) -> CausalWanStream:
    """Read the family's part of `hf_config` and the serving options. Raises ValueError if either is
    invalid.
    """
    options = CausalWanOptions.of_checkpoint(checkpoint, omni.model)
    config = CausalWanConfig.from_checkpoint(checkpoint["transformer"])
    few_steps = options.text_schedule().num_steps
    return StreamModelSetup(config, options, resolve_plan(config, options), few_steps)
