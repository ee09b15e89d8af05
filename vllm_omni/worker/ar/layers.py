# SPDX-License-Identifier: Apache-2.0
"""`LayerTaps`: layers of a loaded model that can return hidden states, and their order in its forward's return value.

Every model returns its last layer. Models that can feed an EAGLE-3 drafter (`SupportsEagle3`) also return auxiliary
layers, numbered as transformers' `output_hidden_states`; `omni.hidden_state_layers` names them at start, because
compiled graphs fix them. Held by tests/worker/test_hidden_state_layers.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3, SupportsMultiModal, supports_eagle3

from vllm_omni.config import OmniConfig

_DRAFTERS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True)
class LayerTaps:
    """num_layers: blocks of the model; layers: auxiliary layers that the forward returns, in its order.

    installed: `install` configured these layers (False: they are an EAGLE-3 drafter's, or there are none).
    """

    num_layers: int
    layers: tuple[int, ...]
    installed: bool

    @classmethod
    def install(cls, vllm_config: VllmConfig, model: nn.Module, drafter_reads_layers: bool) -> "LayerTaps":
        """Make a freshly loaded model's forward return the layers named in the options.

        drafter_reads_layers: the forward already returns a drafter's layers, and only these are available: the drafter
        reads every layer that the forward returns. Raises ValueError if the model or configuration does not allow it.
        """
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        options = OmniConfig.from_additional_config(vllm_config.additional_config)
        wanted = tuple(sorted({layer for layer in options.hidden_state_layers if layer != num_layers}))
        if wanted and wanted[-1] > num_layers:
            raise ValueError(f"omni.hidden_state_layers: the model has {num_layers} blocks, got {list(wanted)}")
        if drafter_reads_layers:
            decoder = next(module for module in model.modules() if isinstance(module, EagleModelMixin))
            kept = decoder.aux_hidden_state_layers
            if not set(wanted) <= set(kept):
                raise ValueError(
                    f"omni.hidden_state_layers {list(wanted)}: with this drafter the model keeps {list(kept)} only"
                )
            return cls(num_layers, kept, installed=False)
        if not wanted:
            return cls(num_layers, (), installed=False)
        _check_combination(vllm_config, model)
        _layered(model).set_aux_hidden_state_layers(wanted)
        return cls(num_layers, wanted, installed=True)

    def named(self, returned: Sequence[torch.Tensor] | None) -> dict[int, torch.Tensor]:
        """Layer -> rows, from the extra tensors that the forward returned."""
        return dict(zip(self.layers, returned, strict=True)) if returned is not None and self.layers else {}


def prepare_stages(model: nn.Module) -> None:
    """Reserve slots for auxiliary layers in the intermediate tensors between pipeline stages, or raise ValueError."""
    from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

    eagle3_utils.verify_supports_aux_hidden_states_over_pp(model, "omni.hidden_state_layers")
    eagle3_utils.reserve_aux_intermediate_tensor_slots(model)


def _check_combination(vllm_config: VllmConfig, model: nn.Module) -> None:
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTERS_WITHOUT_MODEL:
        raise ValueError(
            f"omni.hidden_state_layers does not go together with the drafter {speculative.method!r}, which would read "
            f"these layers as its own input; with {', '.join(_DRAFTERS_WITHOUT_MODEL)} it does"
        )
    if _layered(model) is None:
        raise ValueError(
            f"omni.hidden_state_layers: {type(model).__name__} returns its last layer only (it is no SupportsEagle3)"
        )


def _layered(model: nn.Module) -> Any:
    """The part of the model that can keep layers: itself, or its language model."""
    if supports_eagle3(model):
        return model
    inner = model.get_language_model() if isinstance(model, SupportsMultiModal) else None
    return inner if isinstance(inner, SupportsEagle3) else None
