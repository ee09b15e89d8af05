# SPDX-License-Identifier: Apache-2.0
"""`AdapterTarget`: a network that adapters may change, declared by a model (`SupportsAdapters`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import nn

from vllm_omni.model_executor.checkpoint.loading import Rules, rename
from vllm_omni.model_executor.checkpoint.tensor_files import Shape

_WEIGHT = ".weight"


@dataclass(frozen=True)
class AdapterTarget:
    """A network that adapters may change."""

    network: nn.Module
    """This rank's part of the network."""
    shapes: Mapping[str, Shape]
    """Shape of every tensor in the full network, keyed by checkpoint name."""
    rules: Rules = ()
    """Rules that map module names in other naming styles to checkpoint names."""
    fixed: tuple[str, ...] = ()
    """`fnmatch` patterns for the names of modules that no adapter may change."""
    linear_types: tuple[type[nn.Module], ...] = ()
    """Additional module types that adapters may change as linear layers. These modules multiply by
    `weight`, whose dimensions after the first are flattened. vLLM's and torch's linear layers are
    always included.
    """
    file_mark: str | None = None
    """Lower-case regular expression that matches the names of this network's files. Set only if the
    model has several networks.
    """

    def module_named(self, stored: str) -> str:
        """Return the checkpoint name of the module that an adapter's file calls `stored`."""
        return rename(stored + _WEIGHT, self.rules).removesuffix(_WEIGHT)

    def matrix(self, module: str) -> tuple[int, int] | None:
        """Return the (outputs, inputs) of a linear module that adapters may change, or None for any
        other module.
        """
        shape = self.shapes.get(module + _WEIGHT, ())
        if len(shape) < 2 or any(fnmatchcase(module, pattern) for pattern in self.fixed):
            return None
        inputs = 1
        for size in shape[1:]:
            inputs *= size
        return shape[0], inputs

    def matrices(self) -> list[str]:
        """Return the names of all linear modules that adapters may change."""
        names = (name.removesuffix(_WEIGHT) for name in self.shapes if name.endswith(_WEIGHT))
        return [name for name in names if self.matrix(name) is not None]

    def vector(self, tensor: str) -> Shape | None:
        """Return the shape of a tensor that is not part of a linear module (gain, norm bias,
        modulation), or None for any other tensor.
        """
        shape = self.shapes.get(tensor)
        if shape is None or any(fnmatchcase(tensor, pattern) for pattern in self.fixed):
            return None
        module, _, kind = tensor.rpartition(".")
        with_matrix = len(self.shapes.get(module + _WEIGHT, ())) >= 2
        return None if with_matrix and kind in ("weight", "bias") else shape


@runtime_checkable
class SupportsAdapters(Protocol):
    """A model that supports LoRA adapters (`--enable-lora`)."""

    def adapter_targets(self) -> Mapping[str, AdapterTarget]:
        """Return the model's networks, keyed by their names in the diffusers layout (`transformer`,
        `transformer_2`).
        """
