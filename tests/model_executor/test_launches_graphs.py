# SPDX-License-Identifier: Apache-2.0
"""Whether forward passes use CUDA graphs. By default, they do wherever possible.
`omni.model.cuda_graphs` overrides this default.
"""

import pytest
import torch

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
