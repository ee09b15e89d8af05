# SPDX-License-Identifier: Apache-2.0
"""`AdapterTarget`: a network that adapters may change, as a model declares it (`SupportsAdapters`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import nn

from vllm_omni.model_executor.tensor_files import Shape
from vllm_omni.model_executor.weights import Rules, rename

_WEIGHT = ".weight"


@dataclass(frozen=True)
class AdapterTarget:
    """network: this rank's part. shapes: name -> shape of every tensor of the whole network, as its checkpoint has it.

    rules: other names -> these. fixed: modules (`fnmatch`) that no adapter may change. linear_types: modules besides
    vLLM's linear layers and torch's that multiply by `weight`, flattened behind its first dimension. file_mark: how
    the name of a file tells that it is for this network, of several (regular expression, lower case).
    """

    network: nn.Module
    shapes: Mapping[str, Shape]
    rules: Rules = ()
    fixed: tuple[str, ...] = ()
    linear_types: tuple[type[nn.Module], ...] = ()
    file_mark: str | None = None

    def module_named(self, stored: str) -> str:
        """The checkpoint's name of a module that an adapter's file calls `stored`."""
        return rename(stored + _WEIGHT, self.rules).removesuffix(_WEIGHT)

    def matrix(self, module: str) -> tuple[int, int] | None:
        """(outputs, inputs) of a module that multiplies by a matrix and may be changed; None = it is no such one."""
        shape = self.shapes.get(module + _WEIGHT, ())
        if len(shape) < 2 or any(fnmatchcase(module, pattern) for pattern in self.fixed):
            return None
        inputs = 1
        for size in shape[1:]:
            inputs *= size
        return shape[0], inputs

    def matrices(self) -> list[str]:
        """Every module that multiplies by a matrix and may be changed."""
        names = (name.removesuffix(_WEIGHT) for name in self.shapes if name.endswith(_WEIGHT))
        return [name for name in names if self.matrix(name) is not None]

    def vector(self, tensor: str) -> Shape | None:
        """Shape of a tensor that is no matrix and stands beside none: gains, biases of norms, modulation."""
        shape = self.shapes.get(tensor)
        if shape is None or any(fnmatchcase(tensor, pattern) for pattern in self.fixed):
            return None
        module, _, kind = tensor.rpartition(".")
        beside_matrix = len(self.shapes.get(module + _WEIGHT, ())) >= 2
        return None if beside_matrix and kind in ("weight", "bias") else shape


@runtime_checkable
class SupportsAdapters(Protocol):
    """A model whose networks LoRA adapters may change (`--enable-lora`)."""

    def adapter_targets(self) -> Mapping[str, AdapterTarget]:
        """Its networks by the names that files in diffusers' layout use: `transformer`, `transformer_2`."""
