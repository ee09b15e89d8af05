# SPDX-License-Identifier: Apache-2.0
"""Presets of a streaming model: named sets of defaults for its options and for vLLM's precision
arguments.

Each family defines its presets once, as `PRESETS` in its `config.py`. `StreamingOptions` applies
the options of a preset wherever `omni.model` is parsed. The config hook (`registration.py`) applies
the precision of a preset, because vLLM's arguments are known only there. The value of an option
comes from the first of these sources that sets it:

1.  the user;
2.  the world description, which states how this checkpoint was trained;
3.  the preset, which is the same for all checkpoints of a family;
4.  the release or the checkpoint;
5.  the family's default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

PresetName = Literal["reference", "balanced", "realtime", "small"]
DEFAULT_PRESET: Final[PresetName] = "reference"
DEGRADED_PRESET: Final[PresetName] = "realtime"
"""Preset whose values are used for chunks that would otherwise be late (`omni.degradations`)."""

FP8_CHANNELS: Final = 4096
"""Width of the narrowest network that is faster with FP8 weights. FP8 matrix products give no
speedup at 1536 and 2048 channels (docs/architecture/speed_log.md).
"""

_ALSO_SETS: Final = {"denoise_indices": "max_steps", "denoising_steps": "max_steps"}
"""Maps an option set by the user to the preset option that it replaces. Both options select the
denoise steps.
"""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Defaults that one preset sets. All other options have the same values as in the `reference`
    preset.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for options under `omni.model`."""
    quantization: Literal["fp8"] | None = None
    """Default of `--quantization`, or None to keep the weights in `--dtype`."""
    quantized_channels: int = 0
    """Width of the narrowest network whose weights are quantized. Default: 0 (all networks are
    quantized).
    """
    kv_cache_dtype: Literal["fp8"] | None = None
    """Default of `--kv-cache-dtype`, or None for vLLM's default."""

    def defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults for options under `omni.model` that `options` does not set or
        replace.

        Args:
            options: Options under `omni.model` that the user and the world description set.
        """
        replaced = {*options, *(_ALSO_SETS[name] for name in options if name in _ALSO_SETS)}
        return {name: value for name, value in self.model.items() if name not in replaced}


@dataclass(frozen=True, kw_only=True)
class ServedPreset:
    """The preset of a server, as applied to its checkpoint and the user's options."""

    name: PresetName
    """Name of the preset that the server uses."""
    model: Mapping[str, Any]
    """Options under `omni.model` whose values come from the preset."""
    replaced: tuple[str, ...]
    """Preset options that the user or the world description has set to another value."""
    quantization: Literal["fp8"] | None
    """Default of `--quantization`, or None to keep the weights in `--dtype`."""
    kv_cache_dtype: Literal["fp8"] | None
    """Default of `--kv-cache-dtype`, or None for vLLM's default."""
    needs_fp8_device: bool
    """Whether a device without FP8 units is refused. False if the user has set `omni.model.fp8`."""

    @property
    def described(self) -> str:
        """All settings of the preset as a single line of text."""
        parts = [f"{name} {value}" for name, value in self.model.items()]
        flags = {"quantization": self.quantization, "kv-cache-dtype": self.kv_cache_dtype}
        parts += [f"--{flag} {value}" for flag, value in flags.items() if value is not None]
        return ", ".join(parts) or "the release's own settings"

    def next_to(self, *, weights: bool, keys_and_values: bool) -> "ServedPreset":
        """Return the preset without the precision settings that the user or the checkpoint
        determines.

        Args:
            weights: Whether the user or the checkpoint sets the precision of the weights.
            keys_and_values: Whether the user or the checkpoint sets the precision of keys and
                values.
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
    """Return a preset as it applies to a checkpoint.

    Args:
        presets: All presets of the model family.
        name: Name of the preset to apply.
        options: Options under `omni.model` that the user and the world description set.
        channels: Width of the network, in channels.
        fp8: Value of the `omni.model.fp8` option.
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
