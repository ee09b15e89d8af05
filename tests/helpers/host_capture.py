# SPDX-License-Identifier: Apache-2.0
"""A capture for `ForwardGraphs` on a machine without CUDA."""

from collections.abc import Callable

import torch

from vllm_omni.model_executor.layers.cuda_graphs import Replay


def hold(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
    """What a capture does, without CUDA: later runs repeat this call's host side on the same
    input tensors.
    """
    output = torch.empty_like(run())

    def replay() -> None:
        output.copy_(run())

    return output, replay
