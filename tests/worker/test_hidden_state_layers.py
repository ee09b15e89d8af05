# SPDX-License-Identifier: Apache-2.0
"""`LayerTaps` on vLLM's models: retained layers, refusals, and the layer numbers of Hugging Face
Transformers.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.interfaces import SupportsMultiModal

from vllm_omni.worker.ar.layers import LayerTaps, prepare_stages

BLOCKS = 4


@pytest.fixture(scope="module")
def vllm_config(tiny_language_model: Path, single_rank: None) -> VllmConfig:
    return EngineArgs(
        model=str(tiny_language_model), enforce_eager=True, max_model_len=64
    ).create_engine_config()


@pytest.fixture
def model(vllm_config: VllmConfig) -> Iterator[nn.Module]:
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    vllm_config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(vllm_config), torch.device("meta"):
        yield Qwen2ForCausalLM(vllm_config=vllm_config)


def with_layers(config: VllmConfig, *layers: int, method: str | None = None) -> Any:
    return SimpleNamespace(
        model_config=config.model_config,
        additional_config={"omni": {"hidden_state_layers": list(layers)}},
        speculative_config=None if method is None else SimpleNamespace(method=method),
    )


def test_without_options_the_model_is_unchanged(vllm_config: VllmConfig, model: Any) -> None:
    """If `omni.hidden_state_layers` is empty, no layer is retained and the model is unchanged."""
    taps = LayerTaps.install(with_layers(vllm_config), model, drafter_reads_layers=False)
    assert taps == LayerTaps(BLOCKS, (), installed=False)
    assert model.model.aux_hidden_state_layers == () and taps.named(None) == {}


def test_layers_are_retained_in_the_order_of_the_model(vllm_config: VllmConfig, model: Any) -> None:
    """Layers are retained in the model's order.

    Layers may be requested in any order and more than once. The last layer may also be requested,
    although it needs no tap.
    """
    taps = LayerTaps.install(
        with_layers(vllm_config, 3, 0, 3, BLOCKS), model, drafter_reads_layers=False
    )
    assert taps == LayerTaps(
        BLOCKS, (0, 3), installed=True
    ) and model.model.aux_hidden_state_layers == (0, 3)
    first, second = torch.zeros(1), torch.ones(1)
    assert taps.named([first, second]) == {0: first, 3: second}
    assert taps.named(None) == {}
    with pytest.raises(ValueError, match="shorter"):
        taps.named([first])


def test_only_the_layers_of_a_drafter_can_be_requested(vllm_config: VllmConfig, model: Any) -> None:
    """If a drafter is configured, only the layers that it uses can be requested, because it reads
    every layer that the model returns.
    """
    model.set_aux_hidden_state_layers((1, 2))
    taps = LayerTaps.install(with_layers(vllm_config, 2), model, drafter_reads_layers=True)
    assert taps == LayerTaps(
        BLOCKS, (1, 2), installed=False
    ) and model.model.aux_hidden_state_layers == (1, 2)
    assert (
        LayerTaps.install(with_layers(vllm_config, 2, 1), model, drafter_reads_layers=True) == taps
    )
    with pytest.raises(ValueError, match=r"\[3\].*\[1, 2\]"):
        LayerTaps.install(with_layers(vllm_config, 3), model, drafter_reads_layers=True)


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_a_drafter_that_would_read_the_taps_is_refused(
    vllm_config: VllmConfig, model: Any, method: str
) -> None:
    """A drafter that would mistake the tapped layers for its own inputs is refused."""
    with pytest.raises(ValueError, match=f"{method}.*ngram"):
        LayerTaps.install(
            with_layers(vllm_config, 1, method=method), model, drafter_reads_layers=False
        )


def test_layers_can_be_retained_with_ngram_drafts(vllm_config: VllmConfig, model: Any) -> None:
    taps = LayerTaps.install(
        with_layers(vllm_config, 1, method="ngram"), model, drafter_reads_layers=False
    )
    assert taps.installed


def test_a_layer_that_the_model_lacks_is_refused(vllm_config: VllmConfig, model: Any) -> None:
    with pytest.raises(ValueError, match="4 blocks"):
        LayerTaps.install(with_layers(vllm_config, 5), model, drafter_reads_layers=False)


def test_a_model_without_auxiliary_layers_is_refused(vllm_config: VllmConfig) -> None:
    with pytest.raises(ValueError, match="Linear returns only its last layer"):
        LayerTaps.install(with_layers(vllm_config, 1), nn.Linear(1, 1), drafter_reads_layers=False)
    with pytest.raises(
        ValueError, match=r"Linear .*omni\.hidden_state_layers.* pipeline parallelism"
    ):
        prepare_stages(nn.Linear(1, 1))


class MultimodalModel(nn.Module, SupportsMultiModal):
    """A multimodal model that contains a language model."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.inner = language_model

    def get_language_model(self) -> nn.Module:
        return self.inner


def test_a_multimodal_model_retains_layers_of_its_language_model(
    vllm_config: VllmConfig, model: Any
) -> None:
    taps = LayerTaps.install(
        with_layers(vllm_config, 1), MultimodalModel(model), drafter_reads_layers=False
    )
    assert taps.installed and model.model.aux_hidden_state_layers == (1,)
    with pytest.raises(ValueError, match="MultimodalModel returns only its last layer"):
        LayerTaps.install(
            with_layers(vllm_config, 1),
            MultimodalModel(nn.Linear(1, 1)),
            drafter_reads_layers=False,
        )
