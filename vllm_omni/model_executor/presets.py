# SPDX-License-Identifier: Apache-2.0
"""Presets of a streaming model: named defaults of its options and of vLLM's precision arguments.

Each family defines its presets once (`PRESETS` in its `config.py`). `StreamingOptions` applies the
options wherever `omni.model` is parsed, and the config hook (`registration.py`) applies the
precision, because vLLM's arguments are known only there. The value of an option is the first of
these:

1. the user's;
2. that of the world description, which states what this checkpoint was trained with;
3. the preset's, which is the same for all checkpoints of a family;
4. that of the release or the checkpoint, and then the family's default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

PresetName = Literal["reference", "balanced", "realtime", "small"]
DEFAULT_PRESET: Final[PresetName] = "reference"
DEGRADED_PRESET: Final[PresetName] = "realtime"
"""Preset with the values of a chunk that would be late (`omni.degradations`)."""

FP8_CHANNELS: Final = 4096
"""Width of the narrowest network that is faster with FP8 weights. FP8 products have no benefit with
1536 and 2048 channels (docs/architecture/speed_log.md).
"""

_ALSO_SETS: Final = {"denoise_indices": "max_steps", "denoising_steps": "max_steps"}
"""Options that replace another option of a preset, because both select the denoise steps."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Defaults of one preset. All other values are as in `reference`."""

    model: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of `omni.model`."""
    quantization: Literal["fp8"] | None = None
    """Default of `--quantization`. None: weights stay in `--dtype`."""
    quantized_channels: int = 0
    """Width of the narrowest network whose weights are quantized. Default: 0, all networks."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Default of `--kv-cache-dtype`. None: vLLM's."""

    def defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of `omni.model` that apply next to `options`.

        Args:
            options: `omni.model` of the user and of the world description.
        """
        replaced = {*options, *(_ALSO_SETS[name] for name in options if name in _ALSO_SETS)}
        return {name: value for name, value in self.model.items() if name not in replaced}


@dataclass(frozen=True, kw_only=True)
class ServedPreset:
    """The preset of a server, as applied to its checkpoint and the user's options."""

    name: PresetName
    """Name of the preset."""
    model: Mapping[str, Any]
    """Options that have the preset's value."""
    replaced: tuple[str, ...]
    """Options of the preset for which the user or the world description has set another value."""
    quantization: Literal["fp8"] | None
    """Default of `--quantization`. None: weights stay in `--dtype`."""
    kv_cache_dtype: Literal["fp8"] | None
    """Default of `--kv-cache-dtype`. None: vLLM's."""
    needs_fp8_device: bool
    """Whether a device without FP8 is refused. False if the user has set `omni.model.fp8`."""

    @property
    def described(self) -> str:
        """All settings of the preset in one line."""
        parts = [f"{name} {value}" for name, value in self.model.items()]
        flags = {"quantization": self.quantization, "kv-cache-dtype": self.kv_cache_dtype}
        parts += [f"--{flag} {value}" for flag, value in flags.items() if value is not None]
        return ", ".join(parts) or "the release's own settings"

    def next_to(self, *, weights: bool, keys_and_values: bool) -> "ServedPreset":
        """Return the preset without the precision that the user or the checkpoint sets.

        Args:
            weights: Whether the precision of the weights is set.
            keys_and_values: Whether the precision of keys and values is set.
        """
        return replace(
            self,
            quantization=None if weights else self.quantization,
            kv_cache_dtype=None if keys_and_values else self.kv_cache_dtype,
        )


def served_preset(
    presets: Mapping[PresetName, Preset],
    name: PresetName,
    options: Mapping[str, Any],
    *,
    channels: int,
    fp8: bool | None,
) -> ServedPreset:
    """Return a preset as applied to a checkpoint.

    Args:
        presets: Presets of the family.
        name: One of them.
        options: `omni.model` of the user and of the world description.
        channels: Width of the network.
        fp8: The option `fp8`.
    """
    preset = presets[name]
    model = preset.defaults(options)
    quantizes = fp8 is not False and channels >= preset.quantized_channels
    return ServedPreset(
        name=name,
        model=model,
        replaced=tuple(option for option in preset.model if option not in model),
        quantization=preset.quantization if quantizes else None,
        kv_cache_dtype=None if fp8 is False else preset.kv_cache_dtype,
        needs_fp8_device=fp8 is None,
    )
