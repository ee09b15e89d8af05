# SPDX-License-Identifier: Apache-2.0
"""A replacement for CUDA graph capture in `ForwardGraphs`, for machines without CUDA."""

from collections.abc import Callable

import torch

from vllm_omni.model_executor.layers.cuda_graphs import Replay


def hold(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
    """Capture a call as `ForwardGraphs` requires, but without CUDA.

    A replay runs the call's host code again on the same input tensors.
    """
    output = torch.empty_like(run())

    def replay() -> None:
        output.copy_(run())

    return output, replay
