# SPDX-License-Identifier: Apache-2.0
"""Whether forward passes use CUDA graphs. By default, they do wherever possible.
`omni.model.cuda_graphs` overrides this default.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor import vllm_model
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.lingbot_world.pipeline import WorldSetup
from vllm_omni.model_executor.vllm_model import launches_graphs


@pytest.mark.parametrize(
    ("requested", "eager", "offloads", "launches"),
    [
        (None, False, False, True),
        (None, True, False, False),
        (None, False, True, False),
        (True, True, False, True),
        (False, False, False, False),
    ],
)
def test_cuda_graphs_are_the_default_where_possible(
    monkeypatch: pytest.MonkeyPatch,
    requested: bool | None,
    eager: bool,
    offloads: bool,
    launches: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launches_graphs(requested, eager, offloads).is_on == launches
    assert launches_graphs(requested, eager, offloads, 1536).is_on == launches
    assert launches_graphs(requested, eager, offloads, 5120).is_on == bool(requested)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not launches_graphs(requested, eager, offloads).is_on


@pytest.mark.parametrize(
    ("options", "eager", "offloads", "launches"),
    [
        ({}, False, False, False),
        ({"preset": "realtime"}, False, False, True),
        ({"preset": "realtime"}, True, False, False),
        ({"preset": "realtime"}, False, True, False),
        ({"preset": "realtime", "cuda_graphs": False}, False, False, False),
        ({"cuda_graphs": True}, True, False, True),
    ],
)
def test_a_preset_requests_graphs_for_networks_of_any_width(
    monkeypatch: pytest.MonkeyPatch,
    lingbot_world: Path,
    options: dict[str, Any],
    eager: bool,
    offloads: bool,
    launches: bool,
) -> None:
    """LingBot World's `realtime` preset requests graphs, but --enforce-eager, --cpu-offload-gb and
    the user's option still disable them.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_model, "GRAPH_CHANNELS", 1)
    setup = WorldSetup.of_checkpoint(
        hf_config(lingbot_world)["lingbot_world"],
        find_layout(lingbot_world),
        OmniConfig(height=32, width=48, model=options),
        torch.float32,
        ParallelContext(),
        eager=eager,
        offloads=offloads,
    )
    assert setup.cuda_graphs == launches
