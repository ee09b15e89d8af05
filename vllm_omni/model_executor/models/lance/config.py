# SPDX-License-Identifier: Apache-2.0
"""The architecture of a Lance checkpoint (`LanceConfig`), constants (`LanceDefaults`) and serving
options (`LanceOptions`).

The architecture is read from `llm_config.json`, the vision tower's `config.json` and the weight
file's header. A value that this code does not support is an error. Public implementations of Lance
differ from each other. The `convention` option selects the one to follow (`CONVENTIONS`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec

from vllm_omni.config import parse_options
from vllm_omni.model_executor.model_options import ModelOptions

PIXELS_PER_LATENT = 16
FRAMES_PER_LATENT = 4
LATENT_CHANNELS = 48
TIMESTEP_FREQUENCIES = 256
TOKENS_PER_STEP = 4
"""Number of text tokens decoded for an understanding request in one engine step."""

Task = Literal["t2i", "image_edit", "t2v", "i2v", "video_edit", "x2t_image", "x2t_video", "t2t"]
TASKS: tuple[Task, ...] = (
    "t2i",
    "image_edit",
    "t2v",
    "i2v",
    "video_edit",
    "x2t_image",
    "x2t_video",
)
"""The original's tasks. This package also supports `t2t`, a conversation that consists of text
only.
"""
READING_TASKS: tuple[Task, ...] = ("x2t_image", "x2t_video", "t2t")
"""Tasks of understanding requests, which generate text."""
VIDEO_TASKS: tuple[Task, ...] = ("t2v", "i2v", "video_edit")
"""Tasks that generate video latents. Only the video checkpoint was trained for them."""
EDIT_TASKS: tuple[Task, ...] = ("image_edit", "video_edit")
"""Tasks with a reference image or video."""

Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class LanceDefaults:
    """Constants of the released model, and default values for requests."""

    max_latent_size: int = 64
    """Side length of the position table, in latent cells."""
    max_num_video_latent_frames: int = 31
    """Number of latent frames in the video checkpoint's position table."""
    timestep_shift: float = 3.5
    """Shift of the timesteps."""
    num_timesteps: int = 30
    """Number of denoise steps."""
    cfg_text_scale: float = 4.0
    """Scale of the classifier-free guidance against the context without the user's text."""
    cfg_interval: tuple[float, float] = (0.4, 1.0)
    """Interval (low, high) of the timesteps t with guidance: low < t <= high."""
    cfg_renorm_type: str = "global"
    """Renormalisation of the guided velocity; see `ClassifierFreeGuidance.renorm`."""
    cfg_renorm_min: float = 0.0
    """Lower bound on the factor by which the renormalisation scales the velocity."""
    seed: int = 42
    """Seed for requests that do not set one."""
    max_text_tokens: int = 256
    """Maximum number of text tokens for understanding requests that do not set a limit."""
    fps: float = 12.0
    """Frame rate of generated videos, and the rate at which input videos are sampled, in frames per
    second.
    """
    video_seconds: float = 6.0
    """Maximum duration of the part of an input video that is used, in seconds."""
    image_size: tuple[int, int] = (768, 768)
    """(height, width) of an image in pixels if the request does not set a size."""
    video_size: tuple[int, int] = (480, 848)
    """(height, width) of a video in pixels if the request does not set a size."""
    num_frames: int = 49
    """Number of frames in a video if the request does not set a length."""


DEFAULTS = LanceDefaults()


@dataclass(frozen=True)
class VisionConfig:
    """Architecture of the Qwen2.5-VL vision tower. The field names follow Hugging Face
    Transformers. The defaults describe the released tower.
    """

    depth: int = 32
    """Number of layers."""
    hidden_size: int = 1280
    """Width of the tower."""
    num_heads: int = 16
    """Number of attention heads."""
    intermediate_size: int = 3420
    """Width of the feed-forward layers."""
    in_channels: int = 3
    """Number of image channels."""
    patch_size: int = 14
    """Side length of a patch in pixels."""
    temporal_patch_size: int = 2
    """Number of frames per patch."""
    spatial_merge_size: int = 2
    """Side length of the squares merged into one token, in patches."""
    window_size: int = 112
    """Side length of an attention window in pixels."""
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    """Indices of the layers that attend to all tokens instead of a window."""
    out_hidden_size: int = 2048
    """Width of the embeddings that the tower returns. It is equal to the decoder's width."""
    tokens_per_second: int = 2
    """Number of temporal positions per second of video."""
    hidden_act: str = "silu"
    """Activation of the feed-forward layers."""

    def __post_init__(self) -> None:
        fixed = {
            "in_channels": 3,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        }
        fixed["tokens_per_second"] = 2
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(f"vision config {name} must be {value}, got {getattr(self, name)}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "VisionConfig":
        """Read the architecture from a Qwen2.5-VL vision config. Keys that have no field here are
        ignored, because they do not affect inference.
        """
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if "in_channels" not in known and "in_chans" in values:
            known["in_channels"] = values["in_chans"]
        if "fullatt_block_indexes" in known:
            known["fullatt_block_indexes"] = tuple(known["fullatt_block_indexes"])
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Return the constructor arguments for transformers' `Qwen2_5_VLVisionConfig`. The values
        have JSON types.
        """
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**values, "fullatt_block_indexes": list(self.fullatt_block_indexes)}


@dataclass(frozen=True)
class LanceConfig:
    """Architecture of the decoder, with its two experts, and of the latent projections. The
    defaults describe the released 3B model.
    """

    hidden_size: int = 2048
    """Width of the decoder."""
    intermediate_size: int = 11008
    """Width of the feed-forward layers."""
    num_layers: int = 36
    """Number of layers. Each layer has two experts."""
    num_heads: int = 16
    """Number of query heads."""
    num_kv_heads: int = 2
    """Number of key/value heads."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the normalisation layers."""
    rope_theta: float = 1e6
    """Base of the rotary frequencies."""
    mrope_section: tuple[int, int, int] = (16, 24, 24)
    """Numbers of rotary frequencies for time, height and width."""
    vocab_size: int = 151936
    """Number of entries in the text embedding table."""
    max_latent_size: int = DEFAULTS.max_latent_size
    """Side length of the position table, in latent cells."""
    max_latent_frames: int = 1
    """Number of latent frames in the position table: 1 in the image checkpoint, 31 in the video
    checkpoint.
    """
    vision: VisionConfig = field(default_factory=VisionConfig)
    """Architecture of the vision tower."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Ids of special tokens in the checkpoint's config. They must match the tokenizer's ids.
    """

    def __post_init__(self) -> None:
        if (
            self.hidden_size % self.num_heads
            or self.num_heads % self.num_kv_heads
            or self.head_dim % 2
        ):
            raise ValueError(
                f"hidden_size {self.hidden_size}, {self.num_heads} heads and {self.num_kv_heads} "
                "key/value heads do not divide evenly into heads of an even size"
            )
        if sum(self.mrope_section) * 2 != self.head_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} must sum to half the head size {self.head_dim}"
            )
        if self.vision.out_hidden_size != self.hidden_size:
            raise ValueError(
                f"the vision tower's out_hidden_size {self.vision.out_hidden_size} is not the "
                f"decoder's hidden_size {self.hidden_size}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def makes_video(self) -> bool:
        return self.max_latent_frames > 1

    @property
    def max_side(self) -> int:
        """Return the largest height and width, in pixels, for which the position table has
        entries.
        """
        return self.max_latent_size * PIXELS_PER_LATENT

    @property
    def max_frames(self) -> int:
        return 1 + FRAMES_PER_LATENT * (self.max_latent_frames - 1)

    @classmethod
    def from_checkpoint(
        cls, values: Mapping[str, Any], vision: Mapping[str, Any], **latent: Any
    ) -> "LanceConfig":
        """Read the architecture from a checkpoint's configs.

        Args:
            values: Contents of `llm_config.json` (Qwen2.5-VL keys). Empty for the released config.
            vision: The vision tower's config. Empty for the released config.
            latent: The `max_latent_size` and `max_latent_frames` fields.

        Raises:
            ValueError: Some values are not supported. The message names each unsupported value.
        """
        for key, allowed in _REQUIRED.items():
            if key in values and values[key] not in allowed:
                raise ValueError(
                    f"llm_config.json has {key} = {values[key]!r}; this model implements {allowed}"
                )
        fields: dict[str, Any] = {
            name: values[key] for key, name in _RENAMED.items() if key in values
        }
        scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
        if "mrope_section" in scaling:
            fields["mrope_section"] = tuple(scaling["mrope_section"])
        if "rope_theta" in scaling:
            fields["rope_theta"] = scaling["rope_theta"]
        special = {token: values[key] for key, token in _SPECIAL_KEYS.items() if key in values}
        tower = VisionConfig.from_dict(vision or values.get("vision_config") or {})
        return cls(**fields, **latent, vision=tower, special=special)

    @staticmethod
    def checkpoint_keys() -> frozenset[str]:
        """Return the keys of `llm_config.json` that `from_checkpoint` reads."""
        groups = ("rope_scaling", "rope_parameters", "vision_config")
        return frozenset((*_RENAMED, *_REQUIRED, *_SPECIAL_KEYS, *groups))


_RENAMED = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "vocab_size": "vocab_size",
}
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen2_5_vl",),
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
}
_SPECIAL_KEYS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}


@dataclass(frozen=True)
class LanceChoices:
    """Settings that differ between the public implementations of Lance.

    The defaults follow the original's code path that uses a K/V cache, except for references and
    the vision tower.
    """

    drawing_prompt: Literal["template", "wrapped"] = "template"
    """Prompt for text-to-image and text-to-video: the chat template (`template`), or the chat
    template between an additional <|im_start|> and <|im_end|> (`wrapped`), as in BAGEL.
    """
    uncond_context: Literal["template", "empty"] = "template"
    """Unconditional context for text-to-image and text-to-video: the chat template without the
    user's text (`template`), or no chat template (`empty`). An empty context has no tokens if an
    image is generated, and consists of <|im_start|><|im_end|> if a video is generated. A negative
    prompt is placed between these two tokens.
    """
    edit_apostrophe: Literal["typographic", "ascii"] = "typographic"
    """Apostrophe in the system prompts for edits: U+2019 (`typographic`) or ASCII (`ascii`)."""
    uncond_positions: Literal["cond", "own"] = "cond"
    """Positions of the tokens after the user's text in the unconditional context: the same as in
    the conditional context (`cond`, as in the published results), or recomputed (`own`).
    """
    i2v_noise_place: Literal["behind_text", "before_text"] = "behind_text"
    """First position of the generated block in image-to-video: after all text (`behind_text`),
    or at the start of the user's text (`before_text`).
    """
    understanding_video: Literal["bucket", "smart_resize"] = "bucket"
    """How a clip in an understanding request is prepared: resized to a bucket and sampled at 12
    frames per second (`bucket`), or every frame resized as in Qwen2-VL, up to `max_num_frames`
    frames (`smart_resize`).
    """
    understanding_vit_time: Literal["running", "origin"] = "running"
    """Temporal positions of the vision block in understanding requests: they continue from the text
    positions (`running`) or start at 1000 (`origin`).
    """
    position_table: Literal["computed", "checkpoint"] = "computed"
    """Source of the 3-D table of latent positions: computed (`computed`), or read from the
    checkpoint (`checkpoint`)."""
    reference_latent: Literal["mean", "sample"] = "mean"
    """Latents of a reference image: the mean of the encoder's posterior (`mean`), or a random
    sample from it, as in the original (`sample`).
    """
    pixel_rounding: Literal["round", "truncate"] = "round"
    """Rounding of decoded pixels: to the nearest level (`round`) or down (`truncate`)."""


Convention = Literal["original", "vllm_omni"]

CONVENTIONS: Final[dict[Convention, LanceChoices]] = {
    "original": LanceChoices(),
    "vllm_omni": LanceChoices(
        drawing_prompt="wrapped",
        uncond_context="empty",
        edit_apostrophe="ascii",
        uncond_positions="own",
        i2v_noise_place="before_text",
        understanding_video="smart_resize",
        understanding_vit_time="origin",
        position_table="checkpoint",
        reference_latent="sample",
        pixel_rounding="truncate",
    ),
}


class LanceOptions(ModelOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options for Lance: the fields of `ModelOptions` and those defined here."""

    convention: Convention = "original"
    """Public implementation to follow where the implementations differ: `original` (the default) or
    `vllm_omni`. The model's README lists the differences."""
    max_image_pixels: Positive = 1024 * 1024
    """Maximum `width * height` of a generated image. The server reserves memory for this size."""
    max_video_pixels: Positive = 480 * 848
    """Maximum `width * height` of a generated video. The server reserves memory for this size."""
    max_num_frames: Positive = 121
    """Maximum number of frames in a generated video."""
    max_new_tokens: Positive = 2048
    """Maximum number of text tokens generated per understanding request."""

    @property
    def choices(self) -> LanceChoices:
        return CONVENTIONS[self.convention]

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "LanceOptions":
        """Parse the options in `omni.model`.

        Raises:
            ValueError: An option is invalid. The message contains its key and the allowed values.
        """
        return parse_options(cls, options, "additional_config['omni']['model']")
