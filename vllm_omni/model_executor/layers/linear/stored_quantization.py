# SPDX-License-Identifier: Apache-2.0
"""`StoredQuantization`: apply a checkpoint's quantization only to the layers that are stored
quantized.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
    resolve_quant_method,
)

from vllm_omni.model_executor.layers.linear.linear import PlainLinearMethod


class StoredQuantization(QuantizationConfig):
    """vLLM's quantization config for a checkpoint, restricted to the layers that are stored
    quantized.

    Args:
        config: vLLM's config for the quantization format.
        layers: Names of the quantized layers. A merged layer is listed under the names of the
            layers that it consists of. None: all layers that support quantization are quantized.
    """

    def __init__(self, config: QuantizationConfig, layers: Collection[str] | None) -> None:
        super().__init__()
        self.config = config
        self.layers = None if layers is None else frozenset(layers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the quantization method for `layer`, or None if the layer is not quantized.

        Raises:
            ValueError: Only some parts of a merged layer are quantized.
        """
        if self.layers is not None:
            names = stored_names(layer, prefix)
            quantized = [name for name in names if name in self.layers]
            if not quantized:
                return PlainLinearMethod()
            if len(quantized) < len(names):
                raise ValueError(
                    f"{', '.join(names)} are one product here, and only {', '.join(quantized)} "
                    "quantized"
                )
        return resolve_quant_method(self.config, layer, prefix)

    def get_name(self) -> Any:
        return self.config.get_name()

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return self.config.get_supported_act_dtypes()

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "StoredQuantization":
        raise NotImplementedError("made of a config of vLLM's")


def stored_names(layer: nn.Module, prefix: str) -> Sequence[str]:
    """Return the checkpoint names of the layers merged into `layer`."""
    parts = getattr(layer, "names", None)
    return [prefix] if parts is None else [f"{prefix.rpartition('.')[0]}.{part}" for part in parts]
