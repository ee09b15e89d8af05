# SPDX-License-Identifier: Apache-2.0
"""Architectures of the frozen components, VAE, text and image encoder, without their networks.

The command line and the config parser read these before anything heavy is imported; `vae.py`, `text_encoder.py`
and `image_encoder.py` build the networks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

UMT5_XXL: dict[str, Any] = {
    "model_type": "umt5",
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
}
"""The released encoder. Everything else is `UMT5Config`'s default: gated tanh-GELU, 32 buckets up to 128, eps 1e-6."""

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
"""The released vision tower of image-to-video models (open-clip ViT-H/14)."""
CLIP_HEAD_DIM = 80
"""Of the released tower; tensors do not tell it."""


def clip_tokens(config: Mapping[str, Any]) -> int:
    """Return how many rows a vision tower gives, the class token included."""
    return 1 + (int(config["image_size"]) // int(config["patch_size"])) ** 2


_LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)

LaterCondition = Literal["streamed", "second_chunk", "fresh_grey"]
"""The condition of chunks after the image's, F latent frames each:

- `streamed`: that part of the whole clip's encoding (the original, vLLM-Omni);
- `second_chunk`: the second chunk's, again and again (SGLang);
- `fresh_grey`: 1 + 4 F grey frames encoded as a clip of their own, without its first latent (PR 3701's extension).
"""

_IMPLEMENTED = {
    "attn_scales": [],
    "dropout": 0.0,
    "in_channels": 3,
    "out_channels": 3,
    "is_residual": False,
    "patch_size": None,
}
"""Keys of a diffusers VAE config that must have these values: anything else is another network."""


@dataclass(frozen=True)
class VAEConfig:
    """Architecture of the autoencoder; the defaults are Wan 2.1. `latents_*` normalise each latent channel."""

    base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = _LATENTS_MEAN
    latents_std: tuple[float, ...] = _LATENTS_STD

    def __post_init__(self) -> None:
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temporal_downsample needs {len(self.dim_mult) - 1} entries, one per level below the first of "
                f"dim_mult {self.dim_mult}, got {self.temporal_downsample}"
            )
        if len(self.latents_mean) != self.z_dim or len(self.latents_std) != self.z_dim:
            raise ValueError(
                f"latents_mean and latents_std need z_dim = {self.z_dim} values, "
                f"got {len(self.latents_mean)} and {len(self.latents_std)}"
            )

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent cell along each side."""
        return int(2 ** len(self.temporal_downsample))

    @property
    def temporal_factor(self) -> int:
        """Pixel frames per latent frame, except the first of a stream, which stands for 1."""
        return int(2 ** sum(self.temporal_downsample))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "VAEConfig":
        """Read a diffusers `AutoencoderKLWan` config. Raises ValueError on unknown keys or another architecture."""
        values = {key: value for key, value in config.items() if not key.startswith("_")}
        for key, implemented in _IMPLEMENTED.items():
            if values.pop(key, implemented) != implemented:
                raise ValueError(f"VAE config {key!r} must be {implemented!r} (Wan 2.1), got {config[key]!r}")
        if values.pop("decoder_base_dim", None) not in (None, values.get("base_dim", cls.base_dim)):
            raise ValueError(f"VAE config 'decoder_base_dim' must be null, got {config['decoder_base_dim']!r}")
        factors = {name: values.pop(f"scale_factor_{name}", None) for name in ("spatial", "temporal")}
        if "temperal_downsample" in values:  # diffusers' spelling
            values["temporal_downsample"] = values.pop("temperal_downsample")
        known = cls.__dataclass_fields__
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"VAE config has unknown keys {', '.join(unknown)}; known: {', '.join(known)}")
        arguments: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        vae = cls(**arguments)
        for name, factor in (("spatial", vae.spatial_factor), ("temporal", vae.temporal_factor)):
            if factors[name] not in (None, factor):
                raise ValueError(f"VAE config scale_factor_{name} is {factors[name]}, its levels give {factor}")
        return vae

    def to_dict(self) -> dict[str, Any]:
        """Return the diffusers config keys of this architecture, JSON types only."""
        return {
            **_IMPLEMENTED,
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
