# SPDX-License-Identifier: Apache-2.0
"""`LayerTaps`: layers of a loaded model that can return hidden states.

Every model returns the hidden states of its last layer. Models that support EAGLE-3 drafters
(`SupportsEagle3`) can also return auxiliary layers, which are numbered as in transformers'
`output_hidden_states`. Auxiliary layers are configured at startup with `omni.hidden_state_layers`,
because they cannot change once graphs have been compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import (
    EagleModelMixin,
    SupportsEagle3,
    SupportsMultiModal,
    supports_eagle3,
)

from vllm_omni.config import OmniConfig

_DRAFTERS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True)
class LayerTaps:
    """Layers whose hidden states a model returns."""

    num_layers: int
    """Number of blocks in the model."""
    layers: tuple[int, ...]
    """Indices of the auxiliary layers, in the order that the forward pass returns them."""
    installed: bool
    """Whether `install` configured the auxiliary layers. False if a drafter configured the
    auxiliary layers, or if there are none.
    """

    @classmethod
    def install(
        cls, vllm_config: VllmConfig, model: nn.Module, drafter_reads_layers: bool
    ) -> "LayerTaps":
        """Make the forward pass of a newly loaded model return the hidden states of the layers
        named in the options.

        Args:
            vllm_config: Configuration of the engine.
            model: The loaded model.
            drafter_reads_layers: Whether the forward pass already returns layers for a drafter. No
                other layers are then available, because the drafter reads every returned layer.

        Raises:
            ValueError: The model or the configuration does not support the layers.
        """
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        options = OmniConfig.from_additional_config(vllm_config.additional_config)
        wanted = tuple(
            sorted({layer for layer in options.hidden_state_layers if layer != num_layers})
        )
        if wanted and wanted[-1] > num_layers:
            raise ValueError(
                f"omni.hidden_state_layers: the model has {num_layers} blocks, got {list(wanted)}"
            )
        if drafter_reads_layers:
            decoder = next(
                module for module in model.modules() if isinstance(module, EagleModelMixin)
            )
            retained = decoder.aux_hidden_state_layers
            if not set(wanted) <= set(retained):
                raise ValueError(
                    f"omni.hidden_state_layers {list(wanted)}: with this drafter the model returns "
                    f"only {list(retained)}"
                )
            return cls(num_layers, retained, installed=False)
        if not wanted:
            return cls(num_layers, (), installed=False)
        _check_combination(vllm_config, model)
        _layered(model).set_aux_hidden_state_layers(wanted)
        return cls(num_layers, wanted, installed=True)

    def named(self, returned: Sequence[torch.Tensor] | None) -> dict[int, torch.Tensor]:
        """Return the auxiliary hidden states of a forward pass, keyed by layer index."""
        return (
            dict(zip(self.layers, returned, strict=True))
            if returned is not None and self.layers
            else {}
        )


def prepare_stages(model: nn.Module) -> None:
    """Reserve slots for auxiliary layers in the intermediate tensors between pipeline stages.

    Raises:
        ValueError: The model cannot send auxiliary layers between pipeline stages.
    """
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    eagle3_utils.verify_supports_aux_hidden_states_over_pp(model, "omni.hidden_state_layers")
    eagle3_utils.reserve_aux_intermediate_tensor_slots(model)


def _check_combination(vllm_config: VllmConfig, model: nn.Module) -> None:
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTERS_WITHOUT_MODEL:
        raise ValueError(
            f"omni.hidden_state_layers cannot be combined with the drafter {speculative.method!r}, "
            "because it would "
            "read these layers as its own input; supported drafters: "
            f"{', '.join(_DRAFTERS_WITHOUT_MODEL)}"
        )
    if _layered(model) is None:
        raise ValueError(
            f"omni.hidden_state_layers: {type(model).__name__} returns only its last layer (it is "
            "not SupportsEagle3)"
        )


def _layered(model: nn.Module) -> Any:
    """Return the module that can return auxiliary layers: the model itself or its language model.
    The result is None if neither supports auxiliary layers.
    """
    if supports_eagle3(model):
        return model
    inner = model.get_language_model() if isinstance(model, SupportsMultiModal) else None
    return inner if isinstance(inner, SupportsEagle3) else None
