# SPDX-License-Identifier: Apache-2.0
"""CUDA streams for the two experts in a CUDA graph of a denoise step.

In a denoise step, the `gen` expert processes thousands of tokens, and the `und` expert processes
only the two markers of each block. The kernels of the `und` expert use a small part of the device,
so in a graph they run at the same time as those of the `gen` expert. Outside a graph, the host
cannot launch kernels fast enough for that, so both experts use the current stream.

Each layer's attention reads the keys and values of both experts, so the streams wait for each other
once per layer. Between these points, the caches are the only memory that both streams use. All
other tensors are allocated, used and freed on a single stream, so the allocator cannot reuse them
too early.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from vllm_omni.model_executor.models.lance.network.pack import Expert


@cache
def _second_stream(device: int, priority: int) -> torch.cuda.Stream:
    """Return the stream that all graphs share, because the allocator and cuBLAS keep memory for
    each stream that has been used.
    """
    return torch.cuda.Stream(device, priority=priority)


class ExpertStreams:
    """The streams for one forward pass.

    Args:
        experts: The experts that have tokens.
    """

    def __init__(self, experts: Collection[Expert]) -> None:
        self._und: torch.cuda.Stream | None = None
        if (
            len(experts) > 1
            and torch.cuda.is_available()
            and torch.cuda.is_current_stream_capturing()
        ):
            current = torch.cuda.current_stream()
            self._und = _second_stream(current.device_index, current.priority)
            self._und.wait_stream(current)

    def of(self, expert: Expert) -> AbstractContextManager[object]:
        """Return a context manager that selects the stream for an expert's kernels."""
        if self._und is None or expert == "gen":
            return nullcontext()
        return torch.cuda.stream(self._und)

    def join(self) -> None:
        """Make each stream wait for the kernels that have been launched on the other stream."""
        if self._und is not None:
            current = torch.cuda.current_stream()
            self._und.wait_stream(current)
            current.wait_stream(self._und)
