# SPDX-License-Identifier: Apache-2.0
"""The architecture that chunk-by-chunk Wan transformers share, and reading it from a `config.json` key by key.

Keys come in Wan's own or diffusers' style; nothing is guessed.
Held by tests/model_executor/models/lingbot_world/test_lingbot_config.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_omni.model_executor.checkpoint_quantization import DESCRIPTIONS
from vllm_omni.model_executor.models.wan.latents import LATENT_CHANNELS, VAE_SPATIAL


@dataclass(frozen=True)
class WanConfig:
    """Sizes that all Wan transformers have; a family sets the defaults of its released model.

    text_len: rows that every prompt is padded to; the networks were trained with them.
    """

    dim: int
    ffn_dim: int
    in_channels: int
    num_heads: int
    num_layers: int
    out_channels: int = LATENT_CHANNELS
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2 or self.head_dim < 6:
            raise ValueError(f"dim {self.dim} over {self.num_heads} heads must give an even head size >= 6")
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
    """A causal transformer's sizes.

    window_frames, sink_frames, frames_per_chunk: the checkpoint's recommendation; None = it has none.
    native_size: height and width, in pixels, that the family's released models were trained at.
    """

    native_size: ClassVar[tuple[int, int]] = (480, 832)

    window_frames: int | None = None
    sink_frames: int | None = None
    frames_per_chunk: int | None = None

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Pixel size -> latent size. Raises ValueError unless both are multiples of 16."""
        multiple = VAE_SPATIAL * self.patch_size[1]
        if height % multiple or width % multiple or min(height, width) < multiple:
            raise ValueError(f"height and width must be multiples of {multiple} pixels, got {height}x{width}")
        return height // VAE_SPATIAL, width // VAE_SPATIAL

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens of a latent frame of a video of `height` x `width` pixels."""
        latent_height, latent_width = self.latent_size(height, width)
        return latent_height * latent_width // (self.patch_size[1] * self.patch_size[2])


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
"""Checkpoint key -> field, original style and diffusers style."""

REQUIRED: dict[str, tuple[Any, ...]] = {
    "qk_norm": (True, "rms_norm_across_heads"),
    "cross_attn_norm": (True,),
    "image_dim": (None,),
    "added_kv_proj_dim": (None,),
    "pos_embed_seq_len": (None,),
    "window_size": ([-1, -1], (-1, -1)),
}
"""Keys whose value must be one that the code implements."""

IGNORED = ("_diffusers_version", "_name_or_path", "rope_max_seq_len", "architectures", "torch_dtype", "dtype")
"""Keys that change nothing here (rotations are computed, so there is no longest sequence)."""


def check_keys(
    values: Mapping[str, Any],
    where: str,
    read: Iterable[str],
    required: Mapping[str, tuple[Any, ...]],
    ignored: Iterable[str],
) -> None:
    """Raise ValueError naming unknown keys of the config `where`, and the first value that is not implemented.

    read: keys that give sizes. required, ignored: as in `read_architecture`.
    """
    known = sorted({*read, *required, *ignored})
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{where} has unknown keys {unknown}; known: {known}")
    check_implemented(values, where, required)


def check_implemented(values: Mapping[str, Any], where: str, required: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError naming the first value of the config `where` that is not implemented."""
    for key, allowed in required.items():
        if key in values and values[key] not in allowed:
            raise ValueError(f"{where} has {key} = {values[key]!r}; this model implements {allowed}")


def read_architecture(
    values: Mapping[str, Any],
    renamed: Mapping[str, str],
    required: Mapping[str, tuple[Any, ...]],
    ignored: Sequence[str],
    default_heads: int,
    default_dim: int,
) -> dict[str, Any]:
    """Return the constructor arguments that `values` give.

    renamed: checkpoint key -> argument (`attention_head_dim` is folded into `dim`). required: keys whose value must be
    one of those listed. ignored: keys that change nothing. Raises ValueError naming unknown keys, values that are not
    implemented, and keys that contradict each other.
    """
    check_keys(values, "transformer config", renamed, required, (*ignored, *DESCRIPTIONS))
    fields: dict[str, Any] = {}
    for key, name in renamed.items():
        if values.get(key) is None or key in ignored:
            continue
        value = tuple(values[key]) if key == "patch_size" else values[key]
        if name in fields and fields[name] != value:
            raise ValueError(f"transformer config gives {name} twice: {fields[name]} and {value} ({key})")
        fields[name] = value
    head_dim = fields.pop("attention_head_dim", None)
    if head_dim is not None:
        heads = fields.get("num_heads", default_heads)
        dim = fields.setdefault("dim", heads * head_dim)
        if dim != heads * head_dim:
            raise ValueError(f"attention_head_dim {head_dim} contradicts dim {dim} over {heads} heads")
    else:
        fields.setdefault("dim", default_dim)
    return fields
