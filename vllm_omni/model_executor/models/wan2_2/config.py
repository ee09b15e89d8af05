# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Wan 2.2 or 2.1 checkpoint.

`Wan22Config` is the architecture, and `Wan22Checkpoint` adds the fields of `model_index.json`.
`Wan22Options` are the options of a server (`omni.model`), `Wan22RequestOptions` those of a request.
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
"""`t2v`: text only. `i2v`: the latents of the image and a mask are additional input channels.
`ti2v`: text only, or the latents of the image are the first latent frame, with its tokens at
timestep 0.
"""


@dataclass(frozen=True)
class Wan22Config(WanConfig):
    """One transformer's architecture. The defaults are the experts of T2V A14B."""

    dim: int = 5120
    """Width of the network."""
    ffn_dim: int = 13824
    """Width of the feed-forward layers."""
    in_channels: int = 16
    """Input channels."""
    num_heads: int = 40
    """Attention heads."""
    num_layers: int = 40
    """Blocks."""

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "Wan22Config":
        """Read diffusers' `transformer/config.json`.

        Raises ValueError naming unknown keys and unknown values.
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
"""Checkpoint key -> field."""

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "_class_name": ("WanTransformer3DModel",),
    "qk_norm": ("rms_norm_across_heads",),
    "cross_attn_norm": (True,),
    "image_dim": (None,),  # Wan 2.1 image-to-video: a CLIP image encoder
    "added_kv_proj_dim": (None,),
    "pos_embed_seq_len": (None,),
}
_IGNORED = ("_diffusers_version", "_name_or_path", "rope_max_seq_len", "torch_dtype", "dtype")
"""Keys that have no effect here (rotations are computed, so the sequence length is unlimited)."""


@dataclass(frozen=True)
class Wan22Checkpoint:
    """Conditioning, experts and VAE sizes of a checkpoint."""

    kind: Kind
    """See `Kind`."""
    boundary_ratio: float | None
    """`transformer` is used for timesteps at or above this fraction of 1000, `transformer_2` for
    those below. None: one transformer.
    """
    z_dim: int
    """Latent channels."""
    spatial_factor: int
    """Pixels per latent cell side."""
    temporal_factor: int
    """Video frames per latent frame after the first."""

    @property
    def two_experts(self) -> bool:
        return self.boundary_ratio is not None

    @property
    def in_channels(self) -> int:
        """Input channels: noise, and for `i2v` one mask channel per video frame and the image's
        latents."""
        return 2 * self.z_dim + self.temporal_factor if self.kind == "i2v" else self.z_dim

    def latent_frames(self, num_frames: int) -> int:
        """Raise ValueError unless `num_frames` is 1 + a multiple of the temporal factor."""
        if (num_frames - 1) % self.temporal_factor:
            near = 1 + (num_frames - 1) // self.temporal_factor * self.temporal_factor
            raise ValueError(
                f"num_frames must be 1 + a multiple of {self.temporal_factor}, got {num_frames}; "
                f"try {near}"
            )
        return 1 + (num_frames - 1) // self.temporal_factor

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Convert a size in pixels to latent cells. Raises ValueError unless both are multiples of
        `size_multiple`."""
        multiple = self.size_multiple
        if height % multiple or width % multiple or min(height, width) < multiple:
            raise ValueError(
                f"height and width must be multiples of {multiple} pixels, got {height}x{width}"
            )
        return height // self.spatial_factor, width // self.spatial_factor

    @property
    def size_multiple(self) -> int:
        """Pixels per token side: one token is 2 x 2 latent cells."""
        return 2 * self.spatial_factor


@dataclass(frozen=True)
class RecommendedSampling:
    """The authors' sampling defaults (Wan-Video/Wan2.2 and Wan2.1, wan/configs)."""

    num_inference_steps: int
    """Denoise steps."""
    guidance: float
    """Guidance scale of the first or only expert."""
    guidance_2: float | None
    """Guidance scale below the boundary. None: one transformer."""
    num_frames: int
    """Video frames."""
    fps: float
    """Video frames per second."""


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
    """Defaults of requests."""

    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    """Denoise steps. Range: 1 to 1000. Default: the authors'."""
    guidance_scale: Guidance | None = None
    """Guidance scale. Default: the authors'."""
    guidance_scale_2: Guidance | None = None
    """Guidance scale below the boundary. Default: the authors'."""
    num_frames: Count | None = None
    """Video frames. Default: the authors'."""
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    """Video frames per second. Range: above 0, up to 240. Default: the authors'."""
    negative_prompt: str = ""
    """Negative prompt. Default: empty."""
    flow_shift: Shift | None = None
    """Shift of the noise schedule (authors: 3 at 480p, 5 at 720p and above). Default: the
    checkpoint's."""


class Wan22Options(ModelOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`ModelOptions`, and the options of Wan 2.2."""

    defaults: Wan22Defaults = Wan22Defaults()
    """Defaults of requests: `num_inference_steps`, `guidance_scale`, `guidance_scale_2` (below the
    boundary), `num_frames`, `fps`, `negative_prompt` and `flow_shift`."""
    max_num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200
    """Maximum number of denoise steps of a request."""
    max_num_frames: Count = 121
    """Maximum number of frames of a video."""
    text_encoder_device: Literal["cpu"] | None = None
    """Device of the text encoder. `cpu` saves device memory (10.6 GiB for umt5-xxl). Default: the
    same device as the transformer.
    """
    vae_dtype: Literal["fp32", "bf16"] | None = "fp32"
    """Type of the VAE's weights and activations. None: the same dtype as the transformer."""
    vae_tiling: bool = False
    """Decode in overlapping tiles and one latent frame at a time. Needs less memory; not exact."""
    cfg_parallel: bool = False
    """Use the two tensor-parallel ranks for the two branches of classifier-free guidance. Each rank
    has all weights and runs one branch."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "Wan22Options":
        """Parse the options. Raises ValueError with the value and the allowed values."""
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
    """`DiffusionParams.options`."""

    guidance_scale_2: Guidance | None = None
    """Guidance scale below the boundary. Default: the request's `guidance_scale` if it differs from
    the default, otherwise the server's value.
    """
    flow_shift: Shift | None = None
    """Shift of the noise schedule. Default: the server's."""
    step_cache: StepCache | None = None
    """Threshold for skipping steps in which the prediction changes little (`step_cache.py`).
    Default: every step is computed.
    """
