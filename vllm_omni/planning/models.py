# SPDX-License-Identifier: Apache-2.0
"""The networks that `vllm-omni plan` supports, given by name or by checkpoint directory: the
networks of all families that have a `FamilyPlan`.

This module reads configs but no weights, and does not depend on a specific model. Tests:
tests/planning/.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from vllm_omni.model_executor.models.registry import detect_family, family_names, get_family
from vllm_omni.model_executor.presets import DEFAULT_PRESET, PresetName
from vllm_omni.model_executor.streaming.chunk_plan import check_sliding
from vllm_omni.planning.stream_model import TINY_DECODER, FamilyPlan, StreamModel
from vllm_omni.worlds.description import read_description

_OPTIONS: Final = {
    "window_frames": "window",
    "sink_frames": "sinks",
    "latent_frames_per_chunk": "chunk",
    "cuda_graphs": "cuda_graphs",
}
"""Options of `omni.model` and the corresponding fields of `StreamModel`."""


@cache
def family_plans() -> dict[str, FamilyPlan]:
    """Return the plans of all families that have one, keyed by family name, in registry order."""
    return {name: plan for name in family_names() if (plan := get_family(name).plan) is not None}


def size_names() -> list[str]:
    """Return the names of all networks in `FamilyPlan.sizes`."""
    return [name for plan in family_plans().values() for name in plan.sizes]


def known_names() -> list[str]:
    """Return all names that `vllm-omni plan` accepts: those of `size_names`, and the releases that
    `vllm-omni download` accepts.
    """
    return [*size_names(), *(name for plan in family_plans().values() for name in plan.releases)]


def model_of(name: str, preset: PresetName = DEFAULT_PRESET, **changes: Any) -> StreamModel:
    """Return the model with the given name (`known_names`) or in the given checkpoint directory.

    If a name has several meanings, a size (`size_names`) takes precedence over a directory, and a
    directory takes precedence over a release.

    Args:
        name: Name of the model, or path of its checkpoint directory.
        preset: Preset that the model's options are taken from.
        **changes: Fields of `StreamModel` to set.

    Raises:
        ValueError: The model is unknown, or a change or the preset is not supported.
    """
    model = _model_with(name, preset, changes)
    if model.grid_tokens and {"height", "width"} & changes.keys():
        raise ValueError(f"{name}: the checkpoint fixes the video size; drop --height and --width")
    if {"window", "chunk"} & changes.keys():
        check_sliding(model.window, model.sinks, model.chunk)
    return model


def _model_with(name: str, preset: PresetName, changes: Mapping[str, Any]) -> StreamModel:
    path = Path(name)
    for family_name, plan in family_plans().items():
        if name in plan.sizes or (name in plan.releases and not path.is_dir()):
            return _with_preset(plan.named(name, changes), family_name, preset, changes)
    if not path.is_dir():
        raise ValueError(
            f"{name} is neither a checkpoint directory nor one of {', '.join(known_names())}"
        )
    family = detect_family(path)
    if family.plan is None:
        *others, last = family_plans()
        raise ValueError(f"{name} is a {family.name}; `plan` knows {', '.join(others)} and {last}")
    changes = {**_described(path, changes), **changes}
    model = family.plan.of_checkpoint(str(path), family.hf_config(path)[family.name], changes)
    return _with_preset(model, family.name, preset, changes)


def _with_preset(
    model: StreamModel, family_name: str, preset: PresetName, changes: Mapping[str, Any]
) -> StreamModel:
    """Return `model` with the values of a preset. Fields in `changes` keep their values."""
    family = get_family(family_name)
    if changes.get("adapters") and not family.takes_adapters:
        raise ValueError(f"{family_name} takes no adapters; drop --max-loras")
    presets = family.presets
    if preset not in presets:
        raise ValueError(f"{family_name} has no preset {preset!r}; allowed: {', '.join(presets)}")
    values, chosen = presets[preset].model, presets[preset]
    fields = {field: values[option] for option, field in _OPTIONS.items() if option in values}
    fields["denoise"] = min(model.denoise, values.get("max_steps", model.denoise))
    if values.get("decoder") == "tiny":
        fields["autoencoder"] = model.autoencoder.tiny or TINY_DECODER
    fields["text_on_cpu"] = values.get("text_encoder_device") == "cpu"
    if chosen.quantization and model.dim >= chosen.quantized_channels:
        fields["weight_itemsize"] = 1.0
    if chosen.kv_cache_dtype:
        fields["kv_itemsize"] = 1
    own = {field: value for field, value in fields.items() if field not in changes}
    return replace(model, preset=preset, presets=tuple(presets), **own)


def _described(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `StreamModel` that the world description in a checkpoint directory
    sets.
    """
    gpu = read_description(path)
    if gpu is None:
        return {}
    fields = {field: gpu.model[option] for option, field in _OPTIONS.items() if option in gpu.model}
    if not {"height", "width"} & changes.keys():
        width, height = gpu.sizes[0]
        fields |= {"height": height, "width": width}
    return fields
