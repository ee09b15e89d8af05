# SPDX-License-Identifier: Apache-2.0
"""Loads models whose offloaded weights are NaN on a CPU whenever a GPU could not read them.

A layer's weights can be used only between its fetch and its release.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from vllm.model_executor.offloader import set_offloader

from vllm_omni.model_executor.layers.offload import LayerOffloader

Model = TypeVar("Model", bound=nn.Module)


def offloaded_out_of_reach(load: Callable[[], Model]) -> Model:
    """Load a model with the linear layers of all of its blocks in host memory.

    The parameters are NaN while they are not fetched. On a GPU, using a layer before its weights
    have been fetched fails, because the weights are in host memory. On a CPU, such a bug would go
    unnoticed without the NaN values.
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
