# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Wan 2.2 or 2.1 checkpoint.

`Wan22Config` describes the architecture, and `Wan22Checkpoint` adds the fields of
`model_index.json`. `Wan22Options` contains the server's model options (`omni.model`), and
`Wan22RequestOptions` contains the request options.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from vllm_omni.config import parse_options
from vllm_omni.inputs import Count
from vllm_omni.model_executor.model_options import ModelOptions
from vllm_omni.model_executor.models.wan.architecture import WanConfig, read_architecture
from vllm_omni.model_executor.step_cache import StepCache

NUM_TRAIN_TIMESTEPS = 1000

Kind = Literal["t2v", "i2v", "ti2v"]
"""Conditioning of a checkpoint. `t2v` uses only text. With `i2v`, the latents of the start image
and a mask are additional input channels. `ti2v` uses text and, optionally, a start image. The
latents of the start image become the first latent frame, with timestep 0.
"""


@dataclass(frozen=True)
class Wan22Config(WanConfig):
    """Architecture of one transformer. The defaults describe each expert of T2V A14B."""

    dim: int = 5120
    """Width of the network."""
    ffn_dim: int = 13824
    """Width of the feed-forward layers."""
    in_channels: int = 16
    """Number of input channels."""
    num_heads: int = 40
    """Number of attention heads."""
    num_layers: int = 40
    """Number of transformer blocks."""

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "Wan22Config":
        """Create the config from the content of diffusers' `transformer/config.json`.

        Raises:
            ValueError: The config contains unknown keys or unsupported values. The message names
                them.
        """
        return cls(
            **read_architecture(values, _RENAMED, _REQUIRED, _IGNORED, cls.num_heads, cls.dim)
        )


_RENAMED = {
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "text_dim": "text_dim",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "num_attention_heads": "num_heads",
    "attention_head_dim": "attention_head_dim",
    "num_layers": "num_layers",
    "patch_size": "patch_size",
    "eps": "eps",
}
"""Config field for each key of a checkpoint's config."""

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": ("WanTransformer3DModel",),
    "qk_norm": ("rms_norm_across_heads",),
    "cross_attn_norm": (True,),
    "image_dim": (None,),  # set in Wan 2.1 image-to-video (CLIP image encoder)
    "added_kv_proj_dim": (None,),
    "pos_embed_seq_len": (None,),
}
_IGNORED = ("_diffusers_version", "_name_or_path", "rope_max_seq_len", "torch_dtype", "dtype")
"""Ignored keys. `rope_max_seq_len` has no effect, because rotations are computed rather than read
from a table of limited length.
"""


@dataclass(frozen=True)
class Wan22Checkpoint:
    """Conditioning, experts and VAE sizes of a checkpoint."""

    kind: Kind
    """Kind of conditioning."""
    boundary_ratio: float | None
    """Timestep at the boundary between the experts, as a fraction of 1000, or None if there is only
    one transformer. `transformer` runs at timesteps at or above the boundary, and `transformer_2`
    runs below the boundary.
    """
    z_dim: int
    """Number of latent channels."""
    spatial_factor: int
    """Number of pixels per latent cell along each side."""
    temporal_factor: int
    """Number of video frames per latent frame, except for the first latent frame."""

    @property
    def two_experts(self) -> bool:
        return self.boundary_ratio is not None

    @property
    def in_channels(self) -> int:
        """Return the number of input channels. For `i2v`, the input channels include the image
        latents and one mask channel for each video frame in a latent frame.
        """
        return 2 * self.z_dim + self.temporal_factor if self.kind == "i2v" else self.z_dim

    def latent_frames(self, num_frames: int) -> int:
        """Convert a number of video frames to a number of latent frames.

        Raises:
            ValueError: `num_frames` is not 1 plus a multiple of the temporal factor.
        """
        if (num_frames - 1) % self.temporal_factor:
            near = 1 + (num_frames - 1) // self.temporal_factor * self.temporal_factor
            raise ValueError(
                f"num_frames must be 1 + a multiple of {self.temporal_factor}, got {num_frames}; "
                f"try {near}"
            )
        return 1 + (num_frames - 1) // self.temporal_factor

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Convert a size in pixels to latent cells.

        Raises:
            ValueError: The height or width is not a multiple of `size_multiple`.
        """
        multiple = self.size_multiple
        if height % multiple or width % multiple or min(height, width) < multiple:
            raise ValueError(
                f"height and width must be multiples of {multiple} pixels, got {height}x{width}"
            )
        return height // self.spatial_factor, width // self.spatial_factor

    @property
    def size_multiple(self) -> int:
        """Return the side length of a token in pixels. A token covers 2 x 2 latent cells."""
        return 2 * self.spatial_factor


@dataclass(frozen=True)
class RecommendedSampling:
    """Sampling defaults that the model's authors recommend (`wan/configs` in the Wan-Video/Wan2.2
    and Wan-Video/Wan2.1 repositories).
    """

    num_inference_steps: int
    """Number of denoise steps."""
    guidance: float
    """Guidance scale of the first or only expert."""
    guidance_2: float | None
    """Guidance scale below the boundary, or None if there is only one transformer."""
    num_frames: int
    """Number of video frames."""
    fps: float
    """Frame rate of the video, in frames per second."""


def recommended(checkpoint: Wan22Checkpoint) -> RecommendedSampling:
    if checkpoint.kind == "ti2v":
        return RecommendedSampling(50, 5.0, None, 121, 24.0)
    if not checkpoint.two_experts:
        return RecommendedSampling(50, 5.0, None, 81, 16.0)
    if checkpoint.kind == "i2v":
        return RecommendedSampling(40, 3.5, 3.5, 81, 16.0)
    return RecommendedSampling(40, 4.0, 3.0, 81, 16.0)


Guidance = Annotated[float, msgspec.Meta(ge=0, le=100)]
Shift = Annotated[float, msgspec.Meta(gt=0, le=100)]


class Wan22Defaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Default values for request fields."""

    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    """Number of denoise steps, from 1 to 1000. Default: the value recommended by the model's
    authors.
    """
    guidance_scale: Guidance | None = None
    """Guidance scale. Default: the value recommended by the model's authors."""
    guidance_scale_2: Guidance | None = None
    """Guidance scale below the boundary. Default: the value recommended by the model's authors."""
    num_frames: Count | None = None
    """Number of video frames. Default: the value recommended by the model's authors."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    """Frame rate of the video, in frames per second, above 0 and up to 240. Default: the value
    recommended by the model's authors.
    """
    negative_prompt: str = ""
    """Negative prompt. Default: empty."""
    flow_shift: Shift | None = None
    """Shift of the noise schedule. The model's authors recommend 3 at 480p, and 5 at 720p and
    above. Default: the checkpoint's value.
    """


class Wan22Options(ModelOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Serving options of Wan 2.2, in addition to those of `ModelOptions`."""

    defaults: Wan22Defaults = Wan22Defaults()
    """Default values for request fields: `num_inference_steps`, `guidance_scale`,
    `guidance_scale_2` (below the boundary), `num_frames`, `fps`, `negative_prompt` and
    `flow_shift`.
    """
    max_num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200
    """Maximum number of denoise steps per request."""
    max_num_frames: Count = 121
    """Maximum number of frames per video."""
    text_encoder_device: Literal["cpu"] | None = None
    """Device of the text encoder. `cpu` saves device memory (10.6 GiB for umt5-xxl). Default: the
    same device as the transformer.
    """
    vae_dtype: Literal["fp32", "bf16"] | None = "fp32"
    """Dtype of the VAE's weights and activations. With None, the VAE uses the transformer's dtype.
    """
    vae_tiling: bool = False
    """Whether to decode overlapping tiles, one latent frame at a time. Tiling needs less memory,
    but the resulting frames are only approximate.
    """
    cfg_parallel: bool = False
    """Whether the two tensor-parallel ranks run the two branches of classifier-free guidance
    instead of sharding layers. Each rank then holds all weights and runs one branch.
    """

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "Wan22Options":
        """Parse the options.

        Raises:
            ValueError: An option is invalid. The message contains its value and the allowed values.
        """
        parsed = parse_options(cls, options, "omni.model")
        if parsed.cfg_parallel and parsed.sequence_parallel:
            raise ValueError(
                "omni.model: cfg_parallel and sequence_parallel both take the tensor-parallel ranks"
            )
        frames = parsed.defaults.num_frames
        if frames is not None and frames > parsed.max_num_frames:
            raise ValueError(
                f"omni.model: defaults.num_frames {frames} is more than max_num_frames "
                f"{parsed.max_num_frames}"
            )
        return parsed


class Wan22RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of a request (`DiffusionParams.options`)."""

    guidance_scale_2: Guidance | None = None
    """Guidance scale below the boundary. Default: the request's `guidance_scale` if it differs from
    the server's default, otherwise the server's default for this scale.
    """
    flow_shift: Shift | None = None
    """Shift of the noise schedule. Default: the server's default."""
    step_cache: StepCache | None = None
    """Threshold for skipping steps in which the prediction changes little (`step_cache.py`).
    Default: every step is computed.
    """
