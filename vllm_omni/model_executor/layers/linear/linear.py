# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear layers, sharded according to a `ParallelContext`, and the precision of their
weights.

A layer takes its rank and the number of ranks from the `ParallelContext` that the model was built
with rather than from vLLM's tensor-parallel group. With sequence parallelism, or if guidance
branches run on separate ranks, every rank of vLLM's group holds whole layers. All-reduces also go
through the context so that a CUDA graph can end before each one.

`slots` yields the checkpoint name and the slot of every tensor of a layer. The `weight_loader` that
vLLM sets on a parameter extracts this rank's part of a full tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
    resolve_quant_method,
)
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from vllm_omni.model_executor.layers.collectives.parallel import (
    CheckpointSlot,
    ParallelContext,
    ShardedModule,
)
from vllm_omni.model_executor.layers.fast_path import is_half_on_cuda, lacks_triton
from vllm_omni.model_executor.layers.linear.fp8_linear import choose_kernel
from vllm_omni.model_executor.layers.linear.int8_weights import Int8WeightMethod
from vllm_omni.model_executor.layers.linear.quantized_input import Input, product, takes_quantized


class PlainLinearMethod(UnquantizedLinearMethod):
    """Leaves unquantized weights as loaded rather than repacking them, because they move between
    pipeline stages and are reloaded in place.

    vLLM's own method packs a weight for its CPU kernel and drops the original. That method's
    parameters also require a tensor-parallel group when they are created, but this package also
    builds models in processes without such a group.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_cpu = current_platform.is_cpu()

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        weight = torch.empty(
            sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype
        )
        parameter = nn.Parameter(weight, requires_grad=False)
        set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._on_cpu:
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            return functional.linear(x, weight, bias)
        return super().apply(layer, x, bias)


class LinearPrecision(QuantizationConfig):
    """Each linear layer's precision: as loaded, or quantized according to the engine's
    configuration.

    Args:
        quantization: vLLM's config for `--quantization`. None: nothing is quantized.
        retained: `fnmatch` patterns for the names of layers that are not quantized.
        int8: `fnmatch` patterns for the names of layers that get int8 weights (`Int8WeightMethod`)
            if the engine quantizes weights while it loads them. Otherwise, these layers are not
            quantized.
    """

    def __init__(
        self,
        quantization: QuantizationConfig | None = None,
        retained: Sequence[str] = (),
        int8: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.quantization, self.kept, self.int8 = quantization, tuple(retained), tuple(int8)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase:
        if self.quantization is None or _named(prefix, self.kept):
            return PlainLinearMethod()
        if _named(prefix, self.int8):
            return (
                Int8WeightMethod()
                if self._quantizes_while_loading(layer, prefix)
                else PlainLinearMethod()
            )
        method = resolve_quant_method(self.quantization, layer, prefix)
        return (
            PlainLinearMethod()
            if method is None or type(method) is UnquantizedLinearMethod
            else method
        )

    def _quantizes_while_loading(self, layer: nn.Module, prefix: str) -> bool:
        online = self.quantization
        if not isinstance(online, OnlineQuantizationConfig):
            return False
        return online.resolve_quant_method_cls(type(layer), prefix) is not None

    def get_name(self) -> Any:
        return "plain"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LinearPrecision":
        return cls()


@cache
def _quantizer() -> Callable[[torch.Tensor], Input] | None:
    """Return this package's kernel that quantizes CUDA tensors, or None if Triton is missing. The
    kernel is faster than the kernel that vLLM's layers use.
    """
    if lacks_triton():
        return None
    from vllm_omni.model_executor.layers.triton_rows import quantize_rows

    return quantize_rows


class _QuantizedInput(LinearBase):
    """A linear layer that also accepts quantized inputs (`quantized_input.takes_quantized`)."""

    def forward(self, input_: Input) -> Any:
        if isinstance(input_, torch.Tensor) and is_half_on_cuda(input_) and takes_quantized(self):
            quantizer = _quantizer()
            input_ = input_ if quantizer is None else quantizer(input_)
        if isinstance(input_, QuantizedActivation):
            bias = None if self.skip_bias_add else self.bias
            assert bias is None or isinstance(bias, torch.Tensor)
            return product(self, input_, bias)
        if input_.dim() == 2 or isinstance(self.quant_method, PlainLinearMethod):
            return super().forward(input_)
        # vLLM's models pass 2-D inputs, and some of vLLM's kernels (int8 with AMX) accept no other
        # inputs.
        output = super().forward(input_.reshape(-1, input_.shape[-1]))
        assert isinstance(output, torch.Tensor)
        return output.view(*input_.shape[:-1], output.shape[-1])


class ColumnLinear(_QuantizedInput, ColumnParallelLinear, ShardedModule):
    """A linear layer sharded across its output channels."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: ParallelContext,
        quant_config: LinearPrecision,
        prefix: str,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=False,
            tp_rank=parallel.tensor_rank,
            tp_size=parallel.tensor_size,
        )
        _finish_construction(self)

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        rows = _Rows(self, 0, self.output_size_per_partition, self.output_size, self.tp_rank)
        for kind, parameter in self.named_parameters(recurse=False):
            yield f"{prefix}.{kind}", rows.slot(parameter)


class MergedLinear(_QuantizedInput, MergedColumnParallelLinear, ShardedModule):
    """Several linear layers with the same input, merged into one matrix product and sharded across
    their output channels.

    `names` are the names of the merged layers in the checkpoint, relative to this module's parent.
    """

    def __init__(
        self,
        in_features: int,
        names: Sequence[str],
        out_features: Sequence[int],
        parallel: ParallelContext,
        quant_config: LinearPrecision,
        prefix: str,
        *,
        bias: bool = True,
    ) -> None:
        self.names = tuple(names)
        self.output_sizes = list(out_features)
        # Skip the constructor of `MergedColumnParallelLinear`, because that constructor reads the
        # rank and the group size from vLLM's tensor-parallel group.
        ColumnParallelLinear.__init__(
            self,
            in_features,
            sum(out_features),
            bias=bias,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=False,
            tp_rank=parallel.tensor_rank,
            tp_size=parallel.tensor_size,
        )
        _finish_construction(self)

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        parent = prefix.rpartition(".")[0]
        return self.named_slots([f"{parent}.{name}" for name in self.names])

    def named_slots(self, names: Sequence[str]) -> Iterator[tuple[str, CheckpointSlot]]:
        """Yield the merged layers' `slots`, given their full names in the checkpoint."""
        row = 0
        for index, (name, full) in enumerate(zip(names, self.output_sizes, strict=True)):
            rows = _Rows(self, row, full // self.tp_size, full, self.tp_rank, index)
            for kind, parameter in self.named_parameters(recurse=False):
                yield f"{name}.{kind}", rows.slot(parameter, index)
            row += rows.own


class StackedLinear(MergedLinear):
    """A `MergedLinear` whose layers the checkpoint also stores merged, as one tensor under this
    module's name.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        parallel: ParallelContext,
        quant_config: LinearPrecision,
        prefix: str,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(in_features, (), out_features, parallel, quant_config, prefix, bias=bias)

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        for kind, parameter in self.named_parameters(recurse=False):
            shape = (sum(self.output_sizes), *parameter.shape[1:])
            yield (
                f"{prefix}.{kind}",
                CheckpointSlot(shape, parameter.data, None, partial(self._load_all, parameter)),
            )

    def _load_all(self, parameter: Any, full: torch.Tensor) -> None:
        for index, part in enumerate(full.split(self.output_sizes)):
            _load(parameter, (index,), part)


class QKVLinear(_QuantizedInput, QKVParallelLinear, ShardedModule):
    """Query, key and value projections as one matrix product. This rank holds the outputs for its
    own heads, in the order query, key, value.

    If there are more ranks than K/V heads, a K/V head is replicated on all ranks whose query heads
    use it.
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        parallel: ParallelContext,
        quant_config: LinearPrecision,
        prefix: str,
        *,
        bias: bool = True,
    ) -> None:
        ranks = parallel.tensor_size
        self.hidden_size, self.head_size, self.v_head_size = in_features, head_dim, head_dim
        self.total_num_heads, self.total_num_kv_heads = num_heads, num_kv_heads
        self.num_heads, self.num_kv_heads = num_heads // ranks, max(1, num_kv_heads // ranks)
        self.num_kv_head_replicas = max(1, ranks // num_kv_heads)
        self.output_sizes = [
            heads * head_dim * ranks
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        ]
        # Skip the constructor of `QKVParallelLinear`, as in `MergedLinear`.
        ColumnParallelLinear.__init__(
            self,
            in_features,
            sum(self.output_sizes),
            bias=bias,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=False,
            tp_rank=parallel.tensor_rank,
            tp_size=ranks,
        )
        _finish_construction(self)

    def named_slots(self, names: Sequence[str]) -> Iterator[tuple[str, CheckpointSlot]]:
        """Yield the three layers' slots, given their full names in the checkpoint."""
        kv_rank = self.tp_rank // self.num_kv_head_replicas
        row = 0
        for index, (name, heads, own, rank) in enumerate(
            (
                (names[0], self.total_num_heads, self.num_heads, self.tp_rank),
                (names[1], self.total_num_kv_heads, self.num_kv_heads, kv_rank),
                (names[2], self.total_num_kv_heads, self.num_kv_heads, kv_rank),
            )
        ):
            rows = _Rows(self, row, own * self.head_size, heads * self.head_size, rank, index)
            for kind, parameter in self.named_parameters(recurse=False):
                yield f"{name}.{kind}", rows.slot(parameter, "qkv"[index])
            row += rows.own

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        parent = prefix.rpartition(".")[0]
        return self.named_slots([f"{parent}.{name}" for name in "qkv"])


class RowLinear(_QuantizedInput, RowParallelLinear, ShardedModule):
    """A linear layer sharded across its input channels, followed by an all-reduce."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: ParallelContext,
        quant_config: LinearPrecision,
        prefix: str,
        *,
        bias: bool = True,
    ) -> None:
        alone = parallel.tensor_size == 1
        super().__init__(
            in_features // parallel.tensor_size,
            out_features,
            bias=bias,
            skip_bias_add=not alone,
            reduce_results=alone,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=False,
            disable_tp=True,  # the constructor takes no rank, so the rank is set below
        )
        self.parallel = parallel
        self.input_size = in_features
        self.tp_rank, self.tp_size = parallel.tensor_rank, parallel.tensor_size
        self.update_param_tp_status()
        _finish_construction(self)

    def forward(self, input_: Input, alone: bool = False) -> torch.Tensor:
        """Return the layer's output, all-reduced across the ranks. If `alone` is set, return only
        this rank's contribution; see `own_part`.
        """
        part = super().forward(input_)
        assert isinstance(part, torch.Tensor)
        if alone or self.tp_size == 1:
            return part
        summed = self.parallel.all_reduce(part)
        return summed if self.bias is None else summed + self.bias

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's contribution to the result, before the all-reduce. The bias is
        included only if there are no other ranks.

        This method calls the module so that the module's hooks fetch offloaded weights.
        """
        part: torch.Tensor = self(x, alone=True)
        return part

    def slots(self, prefix: str) -> Iterator[tuple[str, CheckpointSlot]]:
        rows = _Rows(self, 0, self.output_size, self.output_size, 0)
        for kind, parameter in self.named_parameters(recurse=False):
            slot = rows.slot(parameter)
            if (dim := getattr(parameter, "input_dim", None)) is not None and self.tp_size > 1:
                own = parameter.shape[dim]
                shape = (*slot.shape[:dim], own * self.tp_size, *slot.shape[dim + 1 :])
                slot = replace(slot, shape=shape, part=(dim, self.tp_rank * own))
            yield f"{prefix}.{kind}", slot


@dataclass(frozen=True)
class _Rows:
    """One checkpoint layer's output channels on this rank, in a module that may merge several
    layers.
    """

    module: LinearBase
    """The module that holds the layer."""
    row: int
    """Index of the layer's first output channel in the module."""
    own: int
    """Number of the layer's output channels that this rank holds."""
    full: int
    """Number of the layer's output channels in the checkpoint."""
    rank: int
    """This rank's index among the ranks that shard the layer."""
    index: int = 0
    """Index of the layer among the module's layers."""

    def slot(self, parameter: Any, *shard: int | str) -> CheckpointSlot:
        """Return the slot for one tensor of the layer: channels of a parameter, a separate scale,
        or a shared value.
        """
        if getattr(parameter, "output_dim", None) is None:
            single = isinstance(parameter, PerTensorScaleParameter)
            target = parameter.data[self.index] if single else parameter.data
            return CheckpointSlot(tuple(target.shape), target, None, _loader(parameter, *shard))
        # A scale per block of channels has fewer entries than the weight has channels.
        channels = self.module.output_size_per_partition
        row, own = (rows * parameter.shape[0] // channels for rows in (self.row, self.own))
        shape = (own * self.full // self.own, *parameter.shape[1:])
        target = parameter.data[row : row + own]
        return CheckpointSlot(shape, target, (0, self.rank * own), _loader(parameter, *shard))


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _finish_construction(layer: LinearBase) -> None:
    """Choose the kernel of a layer with FP8 weights, and prepare loading. Every constructor calls
    this function at its end.

    If vLLM quantizes a layer as soon as it is fully loaded, vLLM has to wait for the bias, too.
    vLLM registers the bias when the weight arrives, but in a checkpoint file the bias comes before
    the weight.
    """
    choose_kernel(layer)
    if layer.quant_method.uses_meta_device:
        initialize_online_processing(layer)


def gelu_of(layer: ColumnLinear, x: Input) -> torch.Tensor:
    """Return a layer's output after the tanh approximation of GELU. On CUDA, GELU is fused into
    cuBLAS's matrix product if the weights and `x` are unquantized, `x` is half-precision, and the
    layer has a bias.

    The fused kernel applies GELU to the fp32 sum, before the sum is rounded.
    """
    weight, bias = layer.weight, layer.bias
    if (
        type(layer.quant_method) is PlainLinearMethod
        and isinstance(x, torch.Tensor)
        and isinstance(bias, torch.Tensor)
    ):
        assert isinstance(weight, torch.Tensor)
        if is_half_on_cuda(x):
            rows_TD = x.reshape(-1, x.shape[-1])
            made = torch._addmm_activation(bias, rows_TD, weight.t(), use_gelu=True)
            return made.view(*x.shape[:-1], made.shape[-1])
    return functional.gelu(layer(x), approximate="tanh")


def quantized_layers(network: nn.Module) -> nn.ModuleList:
    """Return the linear layers that one of vLLM's quantization methods manages. These layers'
    tensors differ from the checkpoint's tensors.
    """
    layers = (module for module in network.modules() if isinstance(module, LinearBase))
    return nn.ModuleList(
        layer for layer in layers if not isinstance(layer.quant_method, PlainLinearMethod)
    )


def check_reloadable(layers: nn.ModuleList) -> None:
    """Raise ValueError if vLLM has discarded the original weights after packing them, as it does
    with int8 on CPUs.
    """
    if any(
        getattr(layer, "weight", None) is None and not hasattr(layer, "weight_packed")
        for layer in layers
    ):
        raise ValueError(
            "reload_weights: vLLM has packed these quantized weights for this device and cannot "
            "load them again in "
            "place; start the server anew"
        )


def check_quantization(network: nn.Module, method: str | None) -> None:
    """Raise ValueError if `method` (`--quantization`) applies to no layer."""
    if not quantized_layers(network):
        raise ValueError(
            f"--quantization {method}: {type(network).__name__} has no layer for it; drop it"
        )


def _loader(parameter: Any, *shard: int | str) -> Callable[[torch.Tensor], None]:
    """Return the function that loads a full tensor into a parameter, or into the part of the
    parameter that belongs to one merged layer.
    """
    return partial(_load, parameter, shard)


def _load(parameter: Any, shard: tuple[int | str, ...], full: torch.Tensor) -> None:
    parameter.weight_loader(parameter, full, *shard)
