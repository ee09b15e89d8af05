# SPDX-License-Identifier: Apache-2.0
"""`ForwardGraphs`: forwards that come again are launched as CUDA graphs instead of kernel by kernel.

A graph repeats the host's decisions at its capture, so a caller names all of them in a key: `identity` of the tensors
that are read and written in place, slots, lengths, branches. Tensors that differ from call to call are inputs: they are
copied to where the graph reads them. A stream whose K/V ring is full comes back to the same slots after one turn of the
ring, so a handful of graphs serves it for ever.

A key's first forward runs as it is (and compiles lazy parts), its second is captured, later ones
are replayed. Keys that differ only in the tensors that are read and written are of one kind: once a forward of it has
run, new keys are captured at their first, so that a new session does not begin with launches kernel by kernel.
A forward that cannot be captured runs as it is, from then on. All graphs share one memory pool, since
only one runs at a time; results are copied out of it.

A forward is one graph, or several with calls between them that no graph may hold (`between_graphs`): collectives, which
stop the devices when NCCL's kernels are replayed. A rank that replays and one that does not yet still meet in each.
Held by tests/model_executor/layers/test_forward_graphs.py.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

logger = logging.getLogger("vllm." + __name__)

Inputs = dict[str, torch.Tensor]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Replay]]
"""Record a forward; returns the tensor its result will be in, and the call that runs it."""


_numbers = WeakTensorKeyDictionary()
_next_number = itertools.count()


def identity(tensor: torch.Tensor) -> int:
    """Return a number that no other tensor object of this process has or had.

    An address would not do: memory that was freed is given to others.
    """
    if tensor not in _numbers:
        _numbers[tensor] = next(_next_number)
    return int(_numbers[tensor])


def between_graphs(run: Callable[[], object]) -> None:
    """Call `run`; in a capture, end a graph before it and begin another behind it, and let replays call it.

    The tensors it reads and writes must be the same at its next call: `kept_copy`, `kept_buffer`.
    """
    if _recording is None:
        run()
    else:
        _recording.break_for(run)


def kept_copy(name: str, x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous; in a capture a copy of it in `kept_buffer`."""
    if _recording is None:
        return x.contiguous()
    return kept_buffer(name, x.shape, x).copy_(x)


def kept_buffer(name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor, contiguous; in a capture the same for all calls of a name and shape.

    So its content must be used before the next call. (A tensor for each would keep its memory for ever.)
    """
    return like.new_empty(shape) if _recording is None else _recording.buffer(name, tuple(shape), like)


class _Recording:
    """A capture in progress. pieces: the replays, in order. buffers: of `kept_buffer`, of all captures."""

    def __init__(self, pool: Any, buffers: dict[Hashable, torch.Tensor]) -> None:
        self.pieces: list[Callable[[], object]] = []
        self._pool, self._buffers = pool, buffers
        self._graph: Any = None

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, decoders of media) may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self.pieces.append(graph.replay)

    def break_for(self, run: Callable[[], object]) -> None:
        self.end()
        self.pieces.append(run)
        self.begin()

    def buffer(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        key = (name, shape, like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(shape)
        return self._buffers[key]

    def replay(self) -> None:
        for piece in self.pieces:
            piece()


_recording: _Recording | None = None


class CudaCapture:
    """Capture on a stream of its own, without the waiting and cache clearing of `torch.cuda.graph`."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        global _recording
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        recording = _Recording(self._pool, self._buffers)
        with torch.cuda.stream(self._stream):
            recording.begin()
            _recording = recording
            try:
                output = run()
            finally:
                _recording = None
                recording.end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return output, recording.replay


class ForwardGraphs:
    """capacity: graphs kept; the one unused for longest makes room."""

    def __init__(self, capacity: int = 128, capture: Capture | None = None) -> None:
        self._capacity = capacity
        self._capture = capture or CudaCapture()
        self._graphs: OrderedDict[Hashable, tuple[torch.Tensor, Replay] | None] = OrderedDict()
        self._inputs: dict[Hashable, Inputs] = {}
        self._refused: set[Hashable] = set()
        self._kinds: set[Hashable] = set()

    def __len__(self) -> int:
        """Number of captured graphs."""
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(
        self,
        key: Hashable | None,
        inputs: Mapping[str, torch.Tensor],
        forward: Callable[[Inputs], torch.Tensor],
        *,
        kind: Hashable | None = None,
    ) -> torch.Tensor:
        """Return `forward(inputs)`, by a graph if this `key` or `kind` came before.

        key: None = never by a graph. kind: all of `key` but the identity of tensors, None = it cannot be told.
        """
        shapes = tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in inputs.items())
        key = None if key is None else (key, shapes)
        if key is None or key in self._refused:
            return forward(dict(inputs))
        if key not in self._graphs:
            self._graphs[key] = None
            while len(self._graphs) > self._capacity:
                self._graphs.popitem(last=False)
            if kind is None or (kind, shapes) not in self._kinds:
                self._kinds.add((kind, shapes))
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
        """Drop every graph: the tensors they read may have moved."""
        self._graphs.clear()
        self._inputs.clear()
        self._refused.clear()
        self._kinds.clear()
        if isinstance(self._capture, CudaCapture):
            self._capture = CudaCapture()  # a pool ends with its last graph
