# SPDX-License-Identifier: Apache-2.0
"""Dimensions of Wan's transformer, VAE, text encoder and image encoder. The networks are in other
modules.

The command line and the config parser can import this module, because it imports nothing heavy. A
`config.json` can use either Wan's or diffusers' keys. Values missing from `config.json` are never
guessed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vllm_omni.model_executor.checkpoint.quantization import DESCRIPTIONS
from vllm_omni.model_executor.models.wan.vae.latents import LATENT_CHANNELS, VAE_SPATIAL


@dataclass(frozen=True)
class WanConfig:
    """Dimensions of a Wan transformer. In a model family's subclass, the defaults describe that
    family's released model.
    """

    dim: int
    """Hidden size."""
    ffn_dim: int
    """Hidden size of the feed-forward layers."""
    in_channels: int
    """Number of input channels, including the conditioning."""
    num_heads: int
    """Number of attention heads."""
    num_layers: int
    """Number of transformer blocks."""
    out_channels: int = LATENT_CHANNELS
    """Number of channels of the predicted latents."""
    freq_dim: int = 256
    """Size of the sinusoidal timestep embedding. It must be even."""
    text_dim: int = 4096
    """Width of the text embeddings."""
    text_len: int = 512
    """Number of tokens that every prompt is padded to, because the networks were trained with
    padding.
    """
    patch_size: tuple[int, int, int] = (1, 2, 2)
    """Patch size over (frame, row, column); only (1, 2, 2) is supported."""
    eps: float = 1e-6
    """Epsilon of the normalisation layers."""

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2 or self.head_dim < 6:
            raise ValueError(
                f"dim {self.dim} over {self.num_heads} heads must give an even head size >= 6"
            )
        if self.patch_size != (1, 2, 2):
            raise ValueError(f"patch_size must be (1, 2, 2), got {self.patch_size}")
        if self.freq_dim % 2:
            raise ValueError(f"freq_dim must be even, got {self.freq_dim}")

    @property
    def hidden_size(self) -> int:
        return self.dim

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


@dataclass(frozen=True)
class ChunkTransformerConfig(WanConfig):
    """Dimensions of a causal transformer, and the serving parameters that its checkpoint
    recommends.
    """

    native_size: ClassVar[tuple[int, int]] = (480, 832)
    """Height and width, in pixels, that the released models were trained at."""
    pixels_per_cell: ClassVar[int] = VAE_SPATIAL
    """Number of pixels along each side of a latent cell in the model's autoencoder."""

    window_frames: int | None = None
    """Recommended K/V window in latent frames, including sink frames. None if the checkpoint does
    not recommend a window."""
    sink_frames: int | None = None
    """Recommended number of sink frames. None if the checkpoint does not recommend one."""
    frames_per_chunk: int | None = None
    """Recommended number of latent frames per chunk. None if the checkpoint does not recommend
    one."""

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Convert a size in pixels to latent cells.

        Raises:
            ValueError: The height or width is not a multiple of two latent cells.
        """
        multiple = self.pixels_per_cell * self.patch_size[1]
        if height % multiple or width % multiple or min(height, width) < multiple:
            raise ValueError(
                f"height and width must be multiples of {multiple} pixels, got {height}x{width}"
            )
        return height // self.pixels_per_cell, width // self.pixels_per_cell

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Return the number of tokens per latent frame for a video of `height` x `width` pixels."""
        latent_height, latent_width = self.latent_size(height, width)
        return latent_height * latent_width // (self.patch_size[1] * self.patch_size[2])


@dataclass(frozen=True)
class Trunk5BConfig(ChunkTransformerConfig):
    """Dimensions of a causal transformer derived from Wan2.2-TI2V-5B. The defaults describe the
    released models.
    """

    native_size: ClassVar[tuple[int, int]] = (704, 1280)
    """Height and width, in pixels, that the released models were trained at."""
    pixels_per_cell: ClassVar[int] = 16
    """Number of pixels along each side of a Wan 2.2 latent cell."""
    dim: int = 3072
    """Width of the network."""
    ffn_dim: int = 14336
    """Width of the feed-forward layers."""
    in_channels: int = 48
    """Number of input channels."""
    out_channels: int = 48
    """Number of channels of the predicted latents, which is equal to the number of input
    channels."""
    num_heads: int = 24
    """Number of attention heads."""
    num_layers: int = 30
    """Number of transformer blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_channels != self.out_channels:
            raise ValueError(
                f"in_dim and out_dim must be equal, got {self.in_channels} and {self.out_channels}"
            )


RENAMED = {
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
"""Config field for each key in a checkpoint's config, in the original or the diffusers style."""

REQUIRED: dict[str, tuple[Any, ...]] = {
    "qk_norm": (True, "rms_norm_across_heads"),
    "cross_attn_norm": (True,),
    "image_dim": (None,),
    "added_kv_proj_dim": (None,),
    "pos_embed_seq_len": (None,),
    "window_size": ([-1, -1], (-1, -1)),
}
"""Transformer config keys that must have one of the listed values, because the code does not
support any others.
"""

IGNORED = (
    "_diffusers_version",
    "_name_or_path",
    "rope_max_seq_len",
    "architectures",
    "torch_dtype",
    "dtype",
)
"""Transformer config keys that are ignored. `rope_max_seq_len` has no effect, because rotations are
computed rather than read from a table of limited length.
"""


def check_keys(
    values: Mapping[str, Any],
    where: str,
    read: Iterable[str],
    required: Mapping[str, tuple[Any, ...]],
    ignored: Iterable[str],
) -> None:
    """Validate a config's keys.

    Args:
        values: The config to validate.
        where: Config name in error messages.
        read: Keys that the caller reads.
        required: Keys with their supported values.
        ignored: Keys that have no effect.

    Raises:
        ValueError: The config contains unknown keys or an unsupported value.
    """
    known = sorted({*read, *required, *ignored})
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{where} has unknown keys {unknown}; known: {known}")
    check_implemented(values, where, required)


def check_implemented(
    values: Mapping[str, Any], where: str, required: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise ValueError for the first unsupported value in a config. `where` is the config name in
    the message.
    """
    for key, allowed in required.items():
        if key in values and values[key] not in allowed:
            raise ValueError(
                f"{where} has {key} = {values[key]!r}; this model implements {allowed}"
            )


def read_architecture(
    values: Mapping[str, Any],
    renamed: Mapping[str, str],
    required: Mapping[str, tuple[Any, ...]],
    ignored: Sequence[str],
    default_heads: int,
    default_dim: int,
) -> dict[str, Any]:
    """Convert a checkpoint's config to constructor arguments.

    Args:
        values: The checkpoint's config.
        renamed: Argument name for each key. `attention_head_dim` is folded into `dim`.
        required: Keys with their supported values.
        ignored: Keys that have no effect.
        default_heads: Number of heads if the config does not specify one.
        default_dim: Hidden size if the config does not specify one.

    Raises:
        ValueError: A key is unknown, keys contradict each other, or a value is not supported.
    """
    check_keys(values, "transformer config", renamed, required, (*ignored, *DESCRIPTIONS))
    fields: dict[str, Any] = {}
    for key, name in renamed.items():
        if values.get(key) is None or key in ignored:
            continue
        value = tuple(values[key]) if key == "patch_size" else values[key]
        if name in fields and fields[name] != value:
            raise ValueError(
                f"transformer config gives {name} twice: {fields[name]} and {value} ({key})"
            )
        fields[name] = value
    head_dim = fields.pop("attention_head_dim", None)
    if head_dim is not None:
        heads = fields.get("num_heads", default_heads)
        dim = fields.setdefault("dim", heads * head_dim)
        if dim != heads * head_dim:
            raise ValueError(
                f"attention_head_dim {head_dim} contradicts dim {dim} over {heads} heads"
            )
    else:
        fields.setdefault("dim", default_dim)
    return fields


UMT5_XXL: dict[str, Any] = {
    "model_type": "umt5",
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
}
"""`UMT5Config` values for the released text encoder. All other values are `UMT5Config` defaults,
for example gated tanh-GELU, 32 position buckets up to distance 128, and eps 1e-6.
"""

CLIP_VIT_H: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
"""`CLIPVisionConfig` values for the released image-to-video models' vision tower (open-clip
ViT-H/14).
"""
CLIP_HEAD_DIM = 80
"""Number of channels per attention head in the released vision tower. It cannot be derived from
tensor shapes.
"""


def clip_tokens(config: Mapping[str, Any]) -> int:
    """Return the length of a vision tower's output sequence, including the class token."""
    return 1 + (int(config["image_size"]) // int(config["patch_size"])) ** 2


_LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
_LATENTS_MEAN_2_2 = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
    *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
    *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
    *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
    *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
_LATENTS_STD_2_2 = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
    *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
    *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
    *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
    *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)

LaterCondition = Literal["streamed", "second_chunk", "fresh_grey"]
"""Conditioning of the chunks after the one with the start image. Each of these chunks has F latent
frames.

- `streamed`: the part of the whole clip's encoding that corresponds to the chunk, as in the
  original and vLLM-Omni;
- `second_chunk`: the second chunk's conditioning, repeated, as in SGLang;
- `fresh_grey`: 1 + 4 F grey frames, encoded as a separate clip whose first latent frame is dropped,
  as in the extensions in vLLM-Omni's pull request 3701.
"""

_IMPLEMENTED: dict[str, Any] = {"attn_scales": [], "dropout": 0.0}
"""Keys of a diffusers VAE config, with their required values. Any other value describes a network
that is not implemented.
"""
_PIXEL_CHANNELS = 3


@dataclass(frozen=True)
class VAEConfig:
    """Architecture of the autoencoder. The defaults describe Wan 2.1; `WAN_2_2_VAE` describes Wan
    2.2.
    """

    base_dim: int = 96
    """Number of channels in the first encoder level and the last decoder level."""
    z_dim: int = 16
    """Number of latent channels."""
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    """Number of channels in each level, as a multiple of `base_dim`."""
    num_res_blocks: int = 2
    """Number of residual blocks per level."""
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    """Whether each level below the first halves the frame rate."""
    latents_mean: tuple[float, ...] = _LATENTS_MEAN
    """Mean of each latent channel, used to normalise latents."""
    latents_std: tuple[float, ...] = _LATENTS_STD
    """Standard deviation of each latent channel, used to normalise latents."""
    decoder_base_dim: int | None = None
    """Number of channels in the decoder's last level. Default: `base_dim`."""
    is_residual: bool = False
    """Whether each level has a parameter-free shortcut around it, as in Wan 2.2."""
    patch_size: int | None = None
    """Patch size (pixels per side). The pixels of each patch are folded into channels before the
    encoder. Default: none (pixels are not folded).
    """

    def __post_init__(self) -> None:
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temporal_downsample needs {len(self.dim_mult) - 1} entries, one per level below "
                "the first of "
                f"dim_mult {self.dim_mult}, got {self.temporal_downsample}"
            )
        if len(self.latents_mean) != self.z_dim or len(self.latents_std) != self.z_dim:
            raise ValueError(
                f"latents_mean and latents_std need z_dim = {self.z_dim} values, "
                f"got {len(self.latents_mean)} and {len(self.latents_std)}"
            )

    @property
    def patch(self) -> int:
        """Return the patch size (pixels per side), or 1 if pixels are not folded into channels."""
        return self.patch_size or 1

    @property
    def frame_channels(self) -> int:
        """Return the number of channels in a frame after each patch's pixels have been folded into
        channels.
        """
        return _PIXEL_CHANNELS * self.patch**2

    @property
    def spatial_factor(self) -> int:
        """Return the number of pixels along each side of a latent cell."""
        return self.patch * int(2 ** len(self.temporal_downsample))

    @property
    def temporal_factor(self) -> int:
        """Return the number of video frames per latent frame. A stream's first latent frame
        corresponds to one video frame.
        """
        return int(2 ** sum(self.temporal_downsample))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "VAEConfig":
        """Read a diffusers `AutoencoderKLWan` config.

        Raises:
            ValueError: The config contains unknown keys, or the architecture is not supported.
        """
        values = {key: value for key, value in config.items() if not key.startswith("_")}
        check_implemented(values, "VAE config", {key: (v,) for key, v in _IMPLEMENTED.items()})
        for key in _IMPLEMENTED:
            values.pop(key, None)
        channels = {name: values.pop(f"{name}_channels", None) for name in ("in", "out")}
        factors = {
            name: values.pop(f"scale_factor_{name}", None) for name in ("spatial", "temporal")
        }
        if "temperal_downsample" in values:  # diffusers' spelling
            values["temporal_downsample"] = values.pop("temperal_downsample")
        known = cls.__dataclass_fields__
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(
                f"VAE config has unknown keys {', '.join(unknown)}; known: {', '.join(known)}"
            )
        arguments: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        if arguments.get("decoder_base_dim") == arguments.get("base_dim", cls.base_dim):
            arguments.pop("decoder_base_dim", None)
        vae = cls(**arguments)
        for name, number in channels.items():
            if number not in (None, vae.frame_channels):
                raise ValueError(
                    f"VAE config '{name}_channels' must be {vae.frame_channels} with patch_size "
                    f"{vae.patch_size}, got {number}"
                )
        for name, factor in (("spatial", vae.spatial_factor), ("temporal", vae.temporal_factor)):
            if factors[name] not in (None, factor):
                raise ValueError(
                    f"VAE config scale_factor_{name} is {factors[name]}, its levels give {factor}"
                )
        return vae

    def to_dict(self) -> dict[str, Any]:
        """Return the architecture under the keys of a diffusers config. The values have JSON
        types.
        """
        return {
            **_IMPLEMENTED,
            "in_channels": self.frame_channels,
            "out_channels": self.frame_channels,
            "is_residual": self.is_residual,
            "patch_size": self.patch_size,
            "decoder_base_dim": self.decoder_base_dim,
            "base_dim": self.base_dim,
            "z_dim": self.z_dim,
            "dim_mult": list(self.dim_mult),
            "num_res_blocks": self.num_res_blocks,
            "temperal_downsample": list(self.temporal_downsample),
            "latents_mean": list(self.latents_mean),
            "latents_std": list(self.latents_std),
            "scale_factor_spatial": self.spatial_factor,
            "scale_factor_temporal": self.temporal_factor,
        }


WAN_2_2_VAE = VAEConfig(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    latents_mean=_LATENTS_MEAN_2_2,
    latents_std=_LATENTS_STD_2_2,
    is_residual=True,
    patch_size=2,
)
"""Architecture of the released Wan 2.2 autoencoder, with 16 x 16 pixels and 4 frames per latent
cell.
"""
