# SPDX-License-Identifier: Apache-2.0
"""`AdaptedLayers`: applies adapters to the modules of a network on this rank.

Each adapted linear layer adds `scale * up(down(x))` to its output. vLLM's layers add the deltas
after their quantization method and before any all-reduce, so adapters also work with quantized
weights. Other layers add the deltas after their `forward`. Gains, norm biases and modulation are
small, so they are overwritten in place (`AdaptedVectors`) and restored bitwise. If no adapter is
active, a layer's output is bitwise equal to the output of a layer without adapter slots.

All memory is allocated once. Every layer has room for `slots` adapters of rank `max_rank`, so
loading an adapter does not change addresses.
"""

# T tokens, I inputs and O outputs of a layer on this rank, R max_rank, r an adapter's rank, S slots

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase

from vllm_omni.model_executor.layers.collectives.parallel import CheckpointSlot, checkpoint_slots
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    MergedLinear,
    QKVLinear,
    RowLinear,
    StackedLinear,
)
from vllm_omni.model_executor.layers.lora.active import ActiveAdapter, active_adapters
from vllm_omni.model_executor.layers.lora.adapter import AdapterWeights, LowRank, TargetName
from vllm_omni.model_executor.layers.lora.target import AdapterTarget


@runtime_checkable
class NamesLinears(Protocol):
    """A module whose linear layers have different names in the checkpoint than in the module
    tree.
    """

    def linears(self, prefix: str) -> Sequence[tuple[LinearBase, Sequence[str]]]:
        """Return each linear layer with the checkpoint names of the weights merged into it.

        Args:
            prefix: Name of this module.
        """


@dataclass(frozen=True)
class CheckpointLayerPart:
    """One checkpoint layer within an adapted layer."""

    name: str
    """Name of the layer in the checkpoint."""
    rows: range
    """The layer's outputs that this rank holds."""
    columns: range
    """The layer's inputs that this rank holds."""
    adds_bias: bool = True
    """Whether this rank adds the bias delta. Only one of the ranks in an all-reduce adds it."""


@dataclass(frozen=True)
class _Held:
    """An adapter in one of a layer's slots, as views of the layer's slot memory."""

    down: torch.Tensor | None
    """Down projections of all parts, concatenated. Shape: [sum of r, I]."""
    ups: tuple[tuple[slice, slice, torch.Tensor], ...]
    """For each part: (outputs of the layer, columns of the `down` product, up projection [the
    part's O, r])."""
    bias: torch.Tensor | None
    """Bias delta, [O]."""


class AdaptedLayer:
    """The adapter slots of one layer. All adapted layers share `scales`, an fp32 device tensor
    [slots].
    """

    def __init__(
        self,
        parts: Sequence[CheckpointLayerPart],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        scales: torch.Tensor,
    ) -> None:
        self.parts = tuple(parts)
        self._scales = scales
        inputs, outputs = len(parts[0].columns), [len(part.rows) for part in parts]
        like = {"dtype": dtype, "device": scales.device}
        self._down = torch.zeros(slots, len(parts) * max_rank, inputs, **like)  # type: ignore[call-overload]
        self._ups = [torch.zeros(slots, size * max_rank, **like) for size in outputs]  # type: ignore[call-overload]
        self._bias = torch.zeros(slots, sum(outputs), **like)  # type: ignore[call-overload]
        self._held: list[_Held | None] = [None] * slots

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._down, *self._ups, self._bias))

    def fill(self, slot: int, differences: Sequence[LowRank | None]) -> None:
        """Copy an adapter's deltas, one for each part of the layer, into a slot. None: the adapter
        does not change the part.
        """
        self._held[slot] = None
        if not any(differences):
            return
        row, output, ups, has_bias = 0, 0, [], False
        bias = self._bias[slot].zero_()
        for part, difference, room in zip(self.parts, differences, self._ups, strict=True):
            rows, columns = part.rows, part.columns
            outputs = slice(output, output + len(rows))
            output = outputs.stop
            if difference is None:
                continue
            if difference.down is not None and difference.up is not None:
                down = difference.down[:, columns.start : columns.stop]
                up = difference.up[rows.start : rows.stop]
                rank = difference.rank
                self._down[slot, row : row + rank].copy_(down, non_blocking=True)
                own = room[slot, : up.numel()].view(up.shape)
                own.copy_(up, non_blocking=True)
                ups.append((outputs, slice(row, row + rank), own))
                row += rank
            if difference.bias is not None and part.adds_bias:
                bias[outputs].copy_(difference.bias[rows.start : rows.stop], non_blocking=True)
                has_bias = True
        self._held[slot] = _Held(
            self._down[slot, :row] if row else None, tuple(ups), bias if has_bias else None
        )

    def add_difference(
        self, x: torch.Tensor, y: torch.Tensor, adapters: Sequence[ActiveAdapter]
    ) -> torch.Tensor:
        """Add the deltas for the inputs `x` [..., I] to the outputs `y` [..., O] in place, and
        return `y`.
        """
        y_TO = y.reshape(-1, y.shape[-1])
        x_TI = x.reshape(-1, x.shape[-1]).to(y.dtype)
        for adapter in adapters:
            held = self._held[adapter.slot]
            if held is None:
                continue
            scale = self._scales[adapter.slot]
            if held.down is not None:
                low_TR = functional.linear(x_TI, held.down.to(y.dtype)) * scale
                for outputs, ranks, up in held.ups:
                    y_TO[:, outputs].addmm_(low_TR[:, ranks], up.to(y.dtype).t())
            if held.bias is not None:
                y_TO += held.bias.to(y.dtype) * scale
        return y_TO.view(y.shape)


class AdaptedMethod(LinearMethodBase):
    """Quantization method that calls the layer's own method and adds the deltas of the active
    adapters.
    """

    def __init__(self, base: Any, layer: AdaptedLayer) -> None:
        self.base = base
        self.layer = layer

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.base.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.base.process_weights_after_loading(layer)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        y: torch.Tensor = self.base.apply(layer, x, bias)
        adapters = active_adapters()
        return self.layer.add_difference(x, y, adapters) if adapters else y


class AdaptedVectors:
    """The tensors that adapters overwrite in place. `slots` maps a tensor name to this rank's part
    of the tensor (`checkpoint_slots`).
    """

    def __init__(self, slots: Mapping[str, CheckpointSlot]) -> None:
        self._slots = dict(slots)
        self._base: dict[str, torch.Tensor] = {}
        self._differences: dict[int, dict[str, torch.Tensor]] = {}
        self._shown: tuple[tuple[int, float], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._slots)

    def fill(self, slot: int, differences: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of an adapter's deltas into a slot. The deltas are full fp32
        tensors.
        """
        self.show(())
        own = {}
        for name, whole in differences.items():
            position = self._slots[name]
            if name not in self._base:
                self._base[name] = position.target.clone()
            if position.part is not None:
                dim, start = position.part
                whole = whole.narrow(dim, start, position.target.shape[dim])
            own[name] = whole.to(position.target.device)
        self._differences[slot] = own

    def show(self, adapters: Sequence[ActiveAdapter]) -> None:
        """Set the tensors to the checkpoint's values plus the deltas of the given adapters."""
        wanted = tuple((one.slot, one.scale) for one in adapters if self._differences.get(one.slot))
        if wanted == self._shown:
            return
        touched = {
            name for slot, _ in (*self._shown, *wanted) for name in self._differences.get(slot, {})
        }
        for name in sorted(touched):
            base = self._base[name]
            changed = [
                (scale, self._differences[slot][name])
                for slot, scale in wanted
                if name in self._differences[slot]
            ]
            value = base
            if changed:
                value = base.float()
                for scale, difference in changed:
                    value = value + scale * difference
            self._slots[name].target.copy_(value)
        self._shown = wanted

    def clear_vectors(self) -> None:
        """Restore the checkpoint's values and drop all saved values, because the tensors are about
        to be reloaded.
        """
        self.show(())
        self._base.clear()
        self._differences.clear()


class AdaptedLayers:
    """All adapted layers and tensors of one network. Adapters take effect only after
    `attach_adapters` has been called.
    """

    def __init__(
        self,
        target: AdapterTarget,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        scales: torch.Tensor,
    ) -> None:
        self._targets: list[tuple[nn.Module, AdaptedLayer]] = []
        self._undo: list[Callable[[], object]] = []
        for layer, parts in layers_of(target):
            if all(target.matrix(part.name) is not None for part in parts):
                adapted_layer = AdaptedLayer(parts, slots, max_rank, dtype, scales)
                self._targets.append((layer, adapted_layer))
        self.vectors = AdaptedVectors(
            {
                name: slot
                for name, slot in checkpoint_slots(target.network).items()
                if target.vector(name) is not None
            }
        )

    @property
    def matrices(self) -> frozenset[str]:
        return frozenset(part.name for _, layer in self._targets for part in layer.parts)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for _, layer in self._targets)

    def attach_adapters(self) -> None:
        for layer, adapted_layer in self._targets:
            self._undo.append(_attach(layer, adapted_layer))

    def detach(self) -> None:
        """Restore the original layers and the checkpoint's values."""
        self.vectors.clear_vectors()
        while self._undo:
            self._undo.pop()()

    def fill(self, slot: int, network: str, weights: AdapterWeights) -> None:
        """Copy an adapter's deltas for this network into a slot."""
        for _, layer in self._targets:
            layer.fill(slot, [weights.matrices.get((network, part.name)) for part in layer.parts])
        vectors: dict[TargetName, torch.Tensor] = dict(weights.vectors)
        self.vectors.fill(
            slot, {name: whole for (owner, name), whole in vectors.items() if owner == network}
        )


def _attach(layer: nn.Module, adapted_layer: AdaptedLayer) -> Callable[[], object]:
    """Make `layer` add the deltas of `adapted_layer` to its output, and return a function that
    restores `layer`.
    """
    if isinstance(layer, LinearBase):
        method = layer.quant_method
        layer.quant_method = AdaptedMethod(method, adapted_layer)

        def restore() -> None:
            layer.quant_method = method

        return restore

    def after(
        module: nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor
    ) -> torch.Tensor | None:
        adapters = active_adapters()
        return adapted_layer.add_difference(inputs[0], y, adapters) if adapters else None

    return layer.register_forward_hook(after).remove


def layers_of(target: AdapterTarget) -> Iterator[tuple[nn.Module, list[CheckpointLayerPart]]]:
    """Yield each linear layer on this rank, together with the checkpoint layers that it consists
    of.
    """
    named: str | None = None  # prefix of the last module that named its own layers
    for prefix, module in target.network.named_modules():
        if named is not None and prefix.startswith(named):
            continue
        if isinstance(module, NamesLinears):
            named = f"{prefix}."
            for layer, names in module.linears(prefix):
                yield layer, _parts(layer, names)
        elif isinstance(module, LinearBase):
            yield module, _parts(module, _names(module, prefix))
        elif isinstance(module, nn.Linear) or type(module) in target.linear_types:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            outputs, inputs = weight.flatten(1).shape
            yield module, [CheckpointLayerPart(prefix, range(outputs), range(inputs))]


def _names(layer: LinearBase, prefix: str) -> list[str]:
    parent = prefix.rpartition(".")[0]
    if isinstance(layer, StackedLinear):
        return [prefix] * len(layer.output_sizes)
    if isinstance(layer, MergedLinear):
        return [f"{parent}.{name}" for name in layer.names]
    if isinstance(layer, QKVLinear):
        return [f"{parent}.{name}" for name in "qkv"]
    return [prefix]


def _parts(layer: LinearBase, names: Sequence[str]) -> list[CheckpointLayerPart]:
    """Return the checkpoint layers that one of this project's linear layers consists of. Each part
    lists the outputs and inputs that this rank holds.
    """
    if isinstance(layer, RowLinear):
        start, own = layer.tp_rank * layer.input_size_per_partition, layer.input_size_per_partition
        return [
            CheckpointLayerPart(
                names[0], range(layer.output_size), range(start, start + own), layer.tp_rank == 0
            )
        ]
    assert isinstance(layer, ColumnLinear | MergedLinear | QKVLinear)
    columns = range(layer.input_size)
    if isinstance(layer, QKVLinear):
        key_rank = layer.tp_rank // layer.num_kv_head_replicas
        positions = [(layer.tp_rank, layer.num_heads), *[(key_rank, layer.num_kv_heads)] * 2]
        sizes = [(rank, heads * layer.head_size) for rank, heads in positions]
    else:
        whole = layer.output_sizes if isinstance(layer, MergedLinear) else [layer.output_size]
        sizes = [(layer.tp_rank, size // layer.tp_size) for size in whole]
    before = (
        list(accumulate(layer.output_sizes, initial=0))
        if isinstance(layer, StackedLinear)
        else [0] * len(sizes)
    )
    starts = [start + rank * own for start, (rank, own) in zip(before, sizes, strict=False)]
    return [
        CheckpointLayerPart(name, range(start, start + own), columns)
        for name, start, (_, own) in zip(names, starts, sizes, strict=True)
    ]
