# SPDX-License-Identifier: Apache-2.0
"""`ForwardGraphs`: forwards that come again are launched as one CUDA graph instead of kernel by kernel.

A graph repeats what the host decided when it was captured, so a caller names everything of that in a key: `identity` of
what is read and written in place, slots, lengths, branches. Tensors that differ from call to call are inputs: they are
copied to where the graph reads them. A stream whose K/V ring is full comes back to the same slots after one turn of the
ring, so a handful of graphs serves it for ever.

A key's first forward runs as it is (which also compiles what is compiled lazily), its second is captured, later ones
are replayed. A forward that cannot be captured runs as it is, from then on. All graphs share one memory pool, since
only one runs at a time; results are copied out of it.
Held by tests/model_executor/layers/test_forward_graphs.py.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

logger = logging.getLogger("vllm." + __name__)

Inputs = dict[str, torch.Tensor]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Replay]]
"""Record a forward; returns where its result will be and what runs it."""


_numbers = WeakTensorKeyDictionary()
_next_number = itertools.count()


def identity(tensor: torch.Tensor) -> int:
    """Return a number that no other tensor object of this process has or had.

    An address would not do: memory that was freed is given to others.
    """
    if tensor not in _numbers:
        _numbers[tensor] = next(_next_number)
    return int(_numbers[tensor])


class CudaCapture:
    """Capture on a stream of its own, without the waiting and cache clearing of `torch.cuda.graph`."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads (NCCL's watchdog, decoders of media) may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._pool = graph.pool()
        return output, graph.replay


class ForwardGraphs:
    """capacity: graphs kept; the one unused for longest makes room."""

    def __init__(self, capacity: int = 128, capture: Capture | None = None) -> None:
        self._capacity = capacity
        self._capture = capture or CudaCapture()
        self._graphs: OrderedDict[Hashable, tuple[torch.Tensor, Replay] | None] = OrderedDict()
        self._inputs: dict[Hashable, Inputs] = {}
        self._refused: set[Hashable] = set()

    def __len__(self) -> int:
        """Number of captured graphs."""
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(
        self, key: Hashable | None, inputs: Mapping[str, torch.Tensor], forward: Callable[[Inputs], torch.Tensor]
    ) -> torch.Tensor:
        """Return `forward(inputs)`, by a graph if this `key` came before. key: None = never by a graph."""
        shapes = tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in inputs.items())
        key = None if key is None else (key, shapes)
        if key is None or key in self._refused:
            return forward(dict(inputs))
        if key not in self._graphs:
            self._graphs[key] = None
            while len(self._graphs) > self._capacity:
                self._graphs.popitem(last=False)
            return forward(dict(inputs))
        self._graphs.move_to_end(key)
        own = self._inputs.setdefault(shapes, {name: torch.empty_like(tensor) for name, tensor in inputs.items()})
        for name, tensor in inputs.items():
            own[name].copy_(tensor)
        graph = self._graphs[key]
        if graph is None:
            try:
                graph = self._capture(lambda: forward(own))
            except Exception:
                logger.exception("a forward could not be captured as a CUDA graph; it will be launched as it is")
                self._refused.add(key)
                del self._graphs[key]
                return forward(dict(inputs))
            self._graphs[key] = graph
        output, replay = graph
        replay()
        return output.clone()

    def forget(self) -> None:
        """Drop every graph: what they read may lie elsewhere now."""
        self._graphs.clear()
        self._inputs.clear()
        self._refused.clear()
