# SPDX-License-Identifier: Apache-2.0
"""Models whose offloaded weights can be used on a CPU only where a GPU could use them: between
fetch and release.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from vllm.model_executor.offloader import set_offloader

from vllm_omni.model_executor.layers.offload import LayerOffloader

Model = TypeVar("Model", bound=nn.Module)


def offloaded_out_of_reach(load: Callable[[], Model]) -> Model:
    """Load a model with all its blocks' linear layers in host memory, whose parameters are NaN
    while not in use.

    On a GPU a layer that is used without its fetch fails, for its weights are elsewhere; on a CPU
    it would just work.
    """
    offloader = LayerOffloader(1 << 40, torch.device("cpu"))
    set_offloader(offloader)
    try:
        model = load()
    finally:
        set_offloader(None)
    offloader.post_init()
    for layer in offloader._layers:
        home = layer.views[id(layer.room)]
        layer.views[id(layer.room)] = {
            name: torch.full_like(view, torch.nan)
            if view.is_floating_point()
            else torch.zeros_like(view)
            for name, view in home.items()
        }
        layer.show(layer.room)
    return model
