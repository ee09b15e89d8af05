# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint's quantization settings to vLLM's `quantization_config`.

The settings are either `quantization_config` in the transformer's `config.json` or the
`hf_quant_config.json` file in the same directory or its parent. FP8 weights with one scale per
tensor need no settings. The settings define only the quantization method. The names of the
quantized layers are derived from the stored tensors, because the layer names in `ignore` and
`targets` are those of the library that wrote the checkpoint.

vLLM reads the converted settings from its config object, selects the method and rejects any other
value of `--quantization`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_omni.model_executor.checkpoint.quantized_weights import (
    QuantizedLayer,
    model_names,
    quantized_layers,
)
from vllm_omni.model_executor.checkpoint.tensor_files import Shape, open_tensors, read_json
from vllm_omni.model_executor.checkpoint.tensor_names import Rules

METHODS = ("modelopt", "compressed-tensors", "fp8")
"""Values of `quant_method` for which vLLM uses the stored weights without converting them."""
READ_BACK = "torchao"
"""Method whose layers are dequantized to `--dtype`. vLLM's own implementation is not used, because
it requires the torchao package and does not support merged layers.
"""
LAYERS_KEY = "omni_layers"
"""Key in `quantization_config`, in addition to vLLM's keys, for the names of the quantized layers.
The value None means all layers that support quantization.
"""

DESCRIPTIONS = ("quantization_config", "compression_config")
"""Keys of a transformer's `config.json` that may contain the settings. The first existing key is
used.
"""

_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4")
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_SINGLE: tuple[Shape, ...] = ((), (1,), (1, 1))


@dataclass(frozen=True)
class _Component:
    """Quantization of one transformer."""

    description: dict[str, Any] | None
    """Quantization settings for vLLM. None: the transformer is not quantized."""
    layers: Mapping[str, QuantizedLayer] | None
    """Quantized layers by name. None: the transformer has no safetensors files."""


def quantization_of(transformers: Mapping[str, Path], rules: Rules = ()) -> dict[str, Any]:
    """Return `{"quantization_config": ...}` for vLLM's config object.

    The result is empty if no layer is quantized or if all quantized layers are dequantized on load.

    Args:
        transformers: Directory or file of each transformer, by name in the pipeline.
        rules: Renames from stored names to the model's names.

    Raises:
        ValueError: A method is not supported, or the transformers use different methods.
    """
    components = {name: _component(path, rules) for name, path in transformers.items()}
    first, *others = (each.description for each in components.values())
    if any(other != first for other in others):
        listed = ", ".join(
            f"{name} {each.description or 'not at all'}" for name, each in components.items()
        )
        raise ValueError(f"the checkpoint's transformers are quantized in different ways: {listed}")
    if first is None or first["quant_method"] == READ_BACK:
        return {}
    layers: list[str] | None = None
    if all(each.layers is not None for each in components.values()):
        layers = [
            f"{name}.{layer}" for name, each in components.items() for layer in each.layers or ()
        ]
    return {"quantization_config": {**first, LAYERS_KEY: layers}}


def _component(path: Path, rules: Rules) -> _Component:
    folder = path if path.is_dir() else path.parent
    description = _described(folder)
    if path.suffix in (".pt", ".pth") or not any(folder.glob("*.safetensors")):
        return _Component(description, None)
    source = open_tensors(path)
    layers = quantized_layers(model_names(source, rules), source.dtypes)
    if description is not None and not layers:
        raise ValueError(
            f"{folder} describes weights quantized by {description['quant_method']}, and all its "
            "tensors are plain; "
            "download it again"
        )
    if (
        description is None
        and layers
        and all(_is_scaled_fp8(each, source.shapes, source.dtypes) for each in layers.values())
    ):
        description = dict(_FP8)
    return _Component(description, layers)


def _is_scaled_fp8(
    layer: QuantizedLayer, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
) -> bool:
    """Whether a layer is stored in e4m3 with one scale, as vLLM's `fp8` requires."""
    return dtypes[layer.weight] == torch.float8_e4m3fn and (
        layer.scale is None or shapes[layer.scale] in _SINGLE
    )


def _described(folder: Path) -> dict[str, Any] | None:
    """Return a transformer's quantization settings, or ModelOpt's settings for the whole pipeline.

    Layer names are removed from the settings.
    """
    values: Any = None
    if (folder / "config.json").exists():
        config = read_json(folder / "config.json")
        values = next((config[key] for key in DESCRIPTIONS if key in config), None)
    for path in (folder / _MODELOPT_FILE, folder.parent / _MODELOPT_FILE):
        if values is None and path.exists():
            values = {"quant_method": "modelopt", **dict(read_json(path).get("quantization", {}))}
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ValueError(
            f"{folder}/config.json: quantization_config must be an object, got "
            f"{type(values).__name__}"
        )
    method = str(values.get("quant_method", "")).lower().replace("_", "-")
    if method.startswith("modelopt"):
        return _modelopt(values, folder)
    if method == "compressed-tensors":
        return _compressed_tensors(values, folder)
    if method == "fp8":
        return {
            key: values[key] for key in ("activation_scheme", "weight_block_size") if key in values
        } | {"quant_method": "fp8"}
    if method == READ_BACK:
        return {"quant_method": READ_BACK}
    allowed = ", ".join((*METHODS, READ_BACK))
    raise ValueError(
        f"{folder} is quantized by {method or 'no method'!r}; served are {allowed}: convert it"
    )


def _modelopt(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    algo = str(values.get("quant_algo", "")).upper()
    if algo not in _MODELOPT_ALGOS:
        raise ValueError(
            f"{folder} is quantized by ModelOpt's {algo!r}; served are {', '.join(_MODELOPT_ALGOS)}"
        )
    return {
        "quant_method": "modelopt",
        "quant_algo": algo,
        "group_size": values.get("group_size", 16),
        "ignore": [],
    }


def _compressed_tensors(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    groups = list(dict(values.get("config_groups", {})).values())
    if len(groups) != 1:
        raise ValueError(
            f"{folder}: compressed-tensors with {len(groups)} config_groups; served is one scheme "
            "for all layers"
        )
    one = {**groups[0], "targets": ["Linear"]}
    return {
        **values,
        "quant_method": "compressed-tensors",
        "config_groups": {"all": one},
        "ignore": [],
    }
