# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of each quantized layer in weight files and dequantizes them.

A quantized linear layer [out, in] is stored as a weight, with one byte or half a byte per value,
and its scales:

| format | weight | scales |
|---|---|---|
| FP8 or int8, one scale | `weight` e4m3, e5m2 or int8 [out, in] | `weight_scale` [], [1] |
| one scale per channel | as above | `weight_scale` [out], [out, 1] |
| one scale per 128x128 block | as above | `weight_scale_inv` or `weight_scale` [out/128, in/128] |
| NVFP4 of ModelOpt | `weight` uint8 [out, in/2] | `weight_scale` e4m3 [out, in/16], `weight_scale_2` [] |
| NVFP4 of compressed-tensors | `weight_packed`, as above | `weight_scale`, `weight_global_scale` [1], the inverse |
| FP8 of the Wan community | `weight` e4m3 or e5m2 | `scale_weight` [], [1]; the file has a tensor scaled_fp8 |
| torchao's Float8Tensor and Int8Tensor | _weight_qdata | _weight_scale and _weight_zero_point [out, 1] |

Input scales (`input_scale`, `scale_input`, `input_global_scale`) are used by kernels and do not
affect the dequantized weights. The formats are those of NVIDIA ModelOpt 0.47, compressed-tensors
0.17, torchao 0.18 (flat safetensors files) and ComfyUI (scaled FP8).
"""  # noqa: E501

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from vllm_omni.model_executor.checkpoint.tensor_files import QUANTIZED_DTYPES, Shape, TensorSource
from vllm_omni.model_executor.checkpoint.tensor_names import Rules, rename
from vllm_omni.model_executor.layers.collectives.parallel import CheckpointSlot

BLOCK = 128
FP4_GROUP = 16
_FP4_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""Values of the 16 e2m1 codes, by code. A byte's lower four bits contain the code of the first of
its two values.
"""

WEIGHTS = ("weight", "weight_packed")
SCALES = ("weight_scale", "weight_scale_inv")
_SECOND_SCALES = ("weight_scale_2", "weight_global_scale")
_INPUT_SCALES = ("input_scale", "input_global_scale")
_ZERO = "weight_zero_point"
COMPANIONS = frozenset((*SCALES, *_SECOND_SCALES, *_INPUT_SCALES, _ZERO))
"""Names of the tensors that accompany a quantized weight: scales and the zero point."""

_SPELLINGS = (
    (r"\.scale_weight\Z", ".weight_scale"),
    (r"\.scale_input\Z", ".input_scale"),
    (r"\._weight_qdata\Z", ".weight"),
    (r"\._weight_(scale|zero_point)\Z", r".weight_\1"),
    (r"^(model\.)?diffusion_model\.", ""),
)
"""Renames that convert community files' and torchao's tensor names to the other libraries' names.
"""
_MARKERS = ("scaled_fp8", "comfy_quant")
"""Last components of the names of tensors that only mark a format: `scaled_fp8` and
`<layer>.comfy_quant`.
"""


def model_names(
    source: TensorSource, rules: Rules = (), ignored: Collection[str] = ()
) -> dict[str, str]:
    """Return the mapping from a model's tensor names to the names in a file. Format markers are
    omitted.

    Args:
        source: File whose tensors are mapped.
        rules: Renames from stored names to the model's names.
        ignored: Stored names to skip.

    Raises:
        ValueError: Two tensors have the same name in the model.
    """
    names: dict[str, str] = {}
    spellings = (*_SPELLINGS, *rules)
    for name in source.shapes:
        if name in ignored or name.rpartition(".")[2] in _MARKERS:
            continue
        target = rename(name, spellings)
        if target in names:
            raise ValueError(
                f"{source.where} holds {target!r} twice, as {names[target]!r} and {name!r}"
            )
        names[target] = name
    return names


@dataclass(frozen=True)
class QuantizedLayer:
    """One quantized layer in a file."""

    tensors: Mapping[str, str]
    """Tensor names in the file, by kind of tensor (`weight`, `weight_scale` and so on)."""

    @property
    def weight(self) -> str:
        return next(self.tensors[kind] for kind in WEIGHTS if kind in self.tensors)

    @property
    def scale(self) -> str | None:
        return next((self.tensors[kind] for kind in SCALES if kind in self.tensors), None)

    @property
    def second_scale(self) -> str | None:
        return next((self.tensors[kind] for kind in _SECOND_SCALES if kind in self.tensors), None)

    @property
    def others(self) -> list[str]:
        """Stored names of the tensors, other than the weight, that dequantization needs."""
        names = (self.scale, self.second_scale, self.tensors.get(_ZERO))
        return [name for name in names if name is not None]

    def shape(self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> Shape:
        """Return the shape of the dequantized weight. This shape differs from the stored one if
        each byte of the weight contains two 4-bit values.
        """
        stored = shapes[self.weight]
        return (*stored[:-1], 2 * stored[-1]) if dtypes[self.weight] == torch.uint8 else stored

    def scale_shapes(
        self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
    ) -> tuple[Shape, ...]:
        """Return the shapes that `weight_scale` may have."""
        shape = self.shape(shapes, dtypes)
        if len(shape) != 2:
            return ((), (1,))
        out, width = shape
        if dtypes[self.weight] == torch.uint8:
            return ((out, width // FP4_GROUP),)
        blocks = (-(-out // BLOCK), -(-width // BLOCK))
        return ((), (1,), (1, 1), (out,), (out, 1), blocks)


def quantized_layers(
    stored: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
) -> dict[str, QuantizedLayer]:
    """Return a file's quantized layers by name.

    Args:
        stored: Mapping from the model's tensor names to the names in the file.
        dtypes: Dtype of each stored tensor.
    """
    layers: dict[str, dict[str, str]] = {}
    for target, name in stored.items():
        layer, _, kind = target.rpartition(".")
        if kind in WEIGHTS and dtypes[name] in QUANTIZED_DTYPES:
            layers[layer] = {kind: name}
    for target, name in stored.items():
        layer, _, kind = target.rpartition(".")
        if kind in COMPANIONS and layer in layers:
            layers[layer][kind] = name
    return {layer: QuantizedLayer(tensors) for layer, tensors in layers.items()}


@dataclass(frozen=True)
class StoredLayout:
    """A file's tensors, matched to a model's tensors."""

    found: dict[str, Shape]
    """Shape of each tensor in the file, by its name in the model."""
    expected: dict[str, Shape]
    """Shape of each tensor that the model requires, by its name in the model."""
    stored: dict[str, str]
    """Mapping from the model's names to the names in the file."""
    read_back: dict[str, QuantizedLayer]
    """Layers to dequantize, by the name of the weight in the model."""

    def mistyped(
        self, dtypes: Mapping[str, torch.dtype], slots: Mapping[str, CheckpointSlot]
    ) -> list[str]:
        """Return the tensors whose values would be wrong if they were loaded into the model.

        Values would be wrong if the file and the model use different dtypes for a tensor, at least
        one of these dtypes is quantized, and the tensor is not dequantized on load.
        """
        faults = []
        for name, slot in slots.items():
            stored, held = dtypes[self.stored[name]], slot.target.dtype
            if (
                name not in self.read_back
                and stored != held
                and not QUANTIZED_DTYPES.isdisjoint((stored, held))
            ):
                faults.append(f"{self.stored[name]} is {stored}, not {held}".replace("torch.", ""))
        return faults


def match_layers(
    stored: Mapping[str, str],
    source: TensorSource,
    expected: Mapping[str, Shape],
    slots: Mapping[str, CheckpointSlot],
) -> StoredLayout:
    """Match a file's tensors to a model's tensors.

    If a layer of this rank has slots for scales, the file must contain these scales. If a layer
    without slots for scales is quantized in the file, it is dequantized. Other ranks' quantized
    layers are ignored, together with their scales.

    Args:
        stored: Mapping from the model's names to the names in the file.
        source: File whose tensors are matched.
        expected: Shape of every tensor in the component, by name.
        slots: This rank's parameters.
    """
    fit = StoredLayout(
        {name: source.shapes[file] for name, file in stored.items()},
        dict(expected),
        dict(stored),
        {},
    )
    scaled = {name.rpartition(".")[0] for name in slots if name.rpartition(".")[2] in COMPANIONS}
    for layer in scaled:
        fit.expected.pop(f"{layer}.weight", None)
    fit.expected.update(
        {name: slot.shape for name, slot in slots.items() if name.rpartition(".")[0] in scaled}
    )
    for layer, quantized in quantized_layers(stored, source.dtypes).items():
        weight = f"{layer}.weight"
        inputs = [f"{layer}.{kind}" for kind in _INPUT_SCALES]
        if layer in scaled:
            unread = [name for name in inputs if name not in slots]
        elif weight in expected:
            unread = [f"{layer}.{kind}" for kind in quantized.tensors]
        else:
            continue
        for name in unread:
            fit.found.pop(name, None)
        if layer not in scaled:
            _read_back(fit, layer, quantized, source) if weight in slots else fit.expected.pop(
                weight
            )
    for name, shape in fit.expected.items():
        if shape == () and fit.found.get(name) == (1,):
            fit.found[name] = ()
    return fit


def _read_back(
    layout: StoredLayout, layer: str, quantized: QuantizedLayer, source: TensorSource
) -> None:
    """Mark a layer in a layout for dequantization, and add the expected shape of a missing or
    misshapen scale, so that the scale is reported.
    """
    weight = f"{layer}.weight"
    layout.read_back[weight], layout.stored[weight] = quantized, quantized.weight
    layout.found[weight] = quantized.shape(source.shapes, source.dtypes)
    allowed = quantized.scale_shapes(source.shapes, source.dtypes)
    if quantized.scale is None or source.shapes[quantized.scale] not in allowed:
        layout.expected[f"{layer}.{SCALES[0]}"] = allowed[0]
        if quantized.scale is not None:
            layout.found[f"{layer}.{SCALES[0]}"] = source.shapes[quantized.scale]
    if source.dtypes[quantized.weight] == torch.uint8 and quantized.second_scale is None:
        layout.expected[f"{layer}.{_SECOND_SCALES[0]}"] = ()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor contains neither NaN nor Inf."""
    if not tensor.dtype.is_floating_point:
        return True
    return bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all())


@dataclass(frozen=True)
class ReadBack:
    """A source that dequantizes the given layers to fp32 and yields them under their weights'
    names.
    """

    source: TensorSource
    """File that contains the layers."""
    layers: Iterable[QuantizedLayer]
    """Layers to dequantize. All other tensors are read as stored."""
    _by_weight: dict[str, QuantizedLayer] = field(init=False, default_factory=dict)
    """The entries in `layers`, by the stored names of their weights."""

    def __post_init__(self) -> None:
        self._by_weight.update({layer.weight: layer for layer in self.layers})

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor). All scales are read first. The weights follow, one at a
        time.
        """
        wanted = list(names)
        layers = [self._by_weight[name] for name in wanted if name in self._by_weight]
        needed = [name for layer in layers for name in layer.others]
        scales = dict(self.source.read_tensors(needed))
        for name, tensor in self.source.read_tensors(wanted):
            layer = self._by_weight.get(name)
            yield name, tensor if layer is None else numbers(layer, tensor, scales)


def numbers(
    layer: QuantizedLayer, weight: torch.Tensor, scales: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Dequantize a stored weight to fp32 [out, in].

    Args:
        layer: Layer that the weight belongs to.
        weight: Weight as stored in the file.
        scales: Scales by their names in the file.
    """
    assert layer.scale is not None
    scale = scales[layer.scale].float()
    if weight.dtype == torch.uint8:
        assert layer.second_scale is not None
        second = scales[layer.second_scale].float()
        scale = scale / second if "weight_global_scale" in layer.tensors else scale * second
        values = torch.tensor(_FP4_VALUES)
        pairs = torch.stack((values[(weight & 15).long()], values[(weight >> 4).long()]), dim=-1)
        return pairs.flatten(-2) * scale.repeat_interleave(FP4_GROUP, dim=-1)
    full = weight.float()
    if _ZERO in layer.tensors:
        full = full - scales[layer.tensors[_ZERO]].float()
    if scale.numel() == 1:
        return full * scale.reshape(())
    out, width = full.shape
    if scale.shape[0] == out and scale.numel() == out:
        return full * scale.reshape(out, 1)
    return full * scale.repeat_interleave(BLOCK, 0)[:out].repeat_interleave(BLOCK, 1)[:, :width]
