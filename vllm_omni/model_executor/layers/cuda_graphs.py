# SPDX-License-Identifier: Apache-2.0
"""`ForwardGraphs`: capture repeated forward passes as CUDA graphs and replay them.

A replayed graph repeats the decisions that the host made during capture. The caller must therefore
identify all of these decisions by passing the tensors that are read and written in place
(`buffers`), and a key that encodes slots, lengths and branches. Tensors that differ between calls
are inputs, which are copied to the address that the graph reads. Inputs in `steady` never change
their values, so they are copied only if a different tensor is passed. A session with a full K/V
ring buffer returns to the same slots after one cycle, and a new session that reuses a pooled ring
buffer (`MemoryPool`) starts at its first slots. A small number of graphs therefore serves all
sessions.

The first forward pass with a key runs eagerly, which also triggers lazy compilation. The second
pass is captured, and later passes are replayed. After one complete forward pass of a `kind`, passes
of the same kind with other keys are captured the first time they run, so a new session does not
start with eager launches. If a capture fails, that forward pass remains eager. All graphs share one
memory pool and one output buffer, because only one graph runs at a time.

A forward pass is captured as one graph, or as several graphs with intervening calls that a graph
cannot contain (`between_graphs`). Collectives are called between graphs, because replaying NCCL's
kernels stalls the devices. Keeping collectives outside graphs also allows one rank to replay while
another rank still runs eagerly.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from vllm_omni.model_executor.layers.kv_cache.memory_pool import MemoryPool

logger = logging.getLogger("vllm." + __name__)

Inputs = dict[str, torch.Tensor]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Replay]]
"""Function that captures a forward pass. It returns the tensor that receives the result, and a
function that replays the pass.
"""

_STALE: Final = 8
"""A graph counts as unused after `_STALE * capacity` replays of other graphs. One cycle of a ring
buffer takes 2 to 4 times `capacity` replays.
"""


_numbers = WeakTensorKeyDictionary()
_next_number = itertools.count()


def identity(tensor: torch.Tensor) -> int:
    """Return an id that is unique among all of this process's tensor objects, past and present.

    The address is not unique, because the allocator reuses freed memory.
    """
    if tensor not in _numbers:
        _numbers[tensor] = next(_next_number)
    return int(_numbers[tensor])


def between_graphs(run: Callable[[], object]) -> None:
    """Call `run` outside any CUDA graph.

    During a capture, the current graph ends, `run` is called and the next graph starts. Replays
    call `run` between the two graphs. `run` must read and write the same tensors in each replay,
    for example tensors returned by `persistent_copy` and `persistent_buffer`.
    """
    if _recording is None:
        run()
    else:
        _recording.break_for(run)


def persistent_copy(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return `x` as a contiguous tensor. During a capture, `x` is copied into a
    `persistent_buffer`.
    """
    if _recording is None:
        return x.contiguous()
    return persistent_buffer(name, x.shape, x).copy_(x)


def persistent_buffer(
    name: str, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return an uninitialised contiguous tensor. During a capture, all calls with the same name,
    shape and dtype share one buffer.

    The caller must use the buffer's content before the next call with the same arguments, which
    returns the same memory. The buffer is shared because a separate tensor for each call would
    occupy memory for as long as the graph exists.

    Args:
        name: Identifies the buffer, together with shape and dtype.
        shape: The tensor's shape.
        like: Tensor that determines the device and the default dtype.
        dtype: The tensor's dtype. Default: the dtype of `like`.
    """
    dtype = dtype or like.dtype
    if _recording is None:
        return like.new_empty(shape, dtype=dtype)
    return _recording.buffer(name, tuple(shape), dtype, like.device)


class _Recording:
    """A capture in progress: the replays recorded so far, in order (`components`), and the buffers
    that all captures share.
    """

    def __init__(self, pool: Any, buffers: dict[Hashable, torch.Tensor]) -> None:
        self.components: list[Callable[[], object]] = []
        self._pool, self._buffers = pool, buffers
        self._graph: Any = None

    def start_capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, media decoders) may use the device during a capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self.components.append(graph.replay)

    def break_for(self, run: Callable[[], object]) -> None:
        self.end()
        self.components.append(run)
        self.start_capture()

    def buffer(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        key = (name, shape, dtype, device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._buffers[key]

    def replay(self) -> None:
        for part in self.components:
            part()


_recording: _Recording | None = None


class CudaCapture:
    """Capture on a dedicated CUDA stream, without the synchronisation and cache clearing that
    `torch.cuda.graph` performs.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        global _recording
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        # captured kernels keep the priority of the capturing stream
        self._stream = self._stream or torch.cuda.Stream(priority=current.priority)
        self._stream.wait_stream(current)
        recording = _Recording(self._pool, self._buffers)
        with torch.cuda.stream(self._stream):
            recording.start_capture()
            _recording = recording
            try:
                output = run()
            finally:
                _recording = None
                recording.end()
        current.wait_stream(self._stream)
        return output, recording.replay


@dataclass(eq=False)
class _Graph:
    """A captured forward pass."""

    output: torch.Tensor
    """Tensor that `replay` writes the result to. All graphs share this tensor."""
    replay: Replay
    """Function that replays the graph."""
    buffers: tuple[TensorWeakRef, ...]
    """Weak references to the tensors that the graph reads and writes in place."""
    last_used: int = 0
    """Sequence number of the latest replay."""

    @property
    def is_dead(self) -> bool:
        """Return whether any of the tensors that the graph reads and writes has been freed."""
        return any(position() is None for position in self.buffers)


class ForwardGraphs:
    """Cache of captured forward passes.

    When the cache is full, graphs with freed tensors are evicted first, then unused graphs. If all
    graphs are in use, a new forward pass remains eager, because a graph that is evicted before its
    next use does not recoup its capture cost.

    Args:
        capacity: Maximum number of graphs.
        capture: Function that records a forward pass. Default: `CudaCapture`.
    """

    def __init__(self, capacity: int = 128, capture: Capture | None = None) -> None:
        self.pool: MemoryPool[Any] = MemoryPool()
        """Closed requests' and sessions' memory. New requests and sessions reuse this memory, so
        they can replay the graphs captured with it.
        """
        self._capacity = capacity
        self._capture = capture or CudaCapture()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()  # least recently used first
        self._replays = 0
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._kinds: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._inputs: dict[Hashable, torch.Tensor] = {}
        self._copied: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Return the number of graphs in the cache."""
        return len(self._graphs)

    def __call__(
        self,
        key: Hashable | None,
        inputs: Mapping[str, torch.Tensor],
        forward: Callable[[Inputs], torch.Tensor],
        *,
        buffers: Sequence[torch.Tensor] = (),
        kind: Hashable | None = None,
        whole: bool = True,
        steady: Collection[str] = (),
    ) -> torch.Tensor:
        """Return `forward(inputs)`, computed by a CUDA graph if this `key` or `kind` has run
        before.

        Args:
            key: Value that identifies all host decisions. None: run eagerly.
            inputs: Tensors that may differ between calls.
            forward: Function that computes the forward pass.
            buffers: Tensors that the forward pass reads and writes in place.
            kind: A value that is the same for all forward passes that launch the same kernels.
                None: only `key` is compared.
            whole: Whether this forward pass launches all kernels that passes of its kind can
                launch.
            steady: Names of inputs that are never modified after their creation.
        """
        shapes = tuple(
            (name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in inputs.items()
        )
        key = (
            None
            if key is None
            else (key, tuple(identity(position) for position in buffers), shapes)
        )
        if key is None or key in self._refused:
            return forward(dict(inputs))
        graph = self._graphs.get(key)
        if graph is None:
            again = self._came_before(key, None if kind is None else (kind, shapes), whole)
            if not (again and self._has_room()):
                return forward(dict(inputs))
        own = self._copy(inputs, steady)
        if graph is None:
            try:
                output, replay = self._capture(lambda: persistent_copy("result", forward(own)))
            except Exception:
                logger.exception(
                    "a forward could not be captured as a CUDA graph; it will be launched as it is"
                )
                self._refused.add(key)
                return forward(dict(inputs))
            graph = self._graphs[key] = _Graph(
                output, replay, tuple(TensorWeakRef(position) for position in buffers)
            )
            self._seen.pop(key, None)
        self._replays += 1
        graph.last_used = self._replays
        self._graphs.move_to_end(key)
        graph.replay()
        return graph.output.clone()

    def clear_graphs(self) -> None:
        """Evict all graphs and free the pooled memory. Call this method after tensors that graphs
        read have moved.
        """
        self.pool.trim(0)
        self._graphs.clear()
        self._seen.clear()
        self._kinds.clear()
        self._refused.clear()
        self._inputs.clear()
        self._copied.clear()
        if isinstance(self._capture, CudaCapture):
            self._capture = CudaCapture()  # the pool is freed with its last graph

    def _came_before(self, key: Hashable, kind: Hashable | None, whole: bool) -> bool:
        """Return whether this key or kind has run before, and record this run. The kind is recorded
        only for a `whole` forward pass.
        """
        again = key in self._seen or kind in self._kinds
        self._seen[key] = None
        self._seen.move_to_end(key)
        while len(self._seen) > _STALE * self._capacity:
            self._seen.popitem(last=False)
        if kind is not None and whole:
            self._kinds.add(kind)
        return again

    def _has_room(self) -> bool:
        """Return whether there is room for one more graph. If the cache is full, dead graphs are
        evicted first or, if there are none, a graph that has not been used for a long time.
        """
        if len(self._graphs) < self._capacity:
            return True
        for key in [key for key, graph in self._graphs.items() if graph.is_dead]:
            del self._graphs[key]
        if len(self._graphs) == self._capacity:
            key, oldest = next(iter(self._graphs.items()))
            if self._replays - oldest.last_used > _STALE * self._capacity:
                del self._graphs[key]
        return len(self._graphs) < self._capacity

    def _copy(self, inputs: Mapping[str, torch.Tensor], steady: Collection[str]) -> Inputs:
        """Copy `inputs` to the tensors that all graphs read. Graphs can share these tensors because
        only one graph runs at a time.
        """
        own: Inputs = {}
        for name, tensor in inputs.items():
            position = (name, tensor.shape, tensor.dtype, tensor.device)
            if position not in self._inputs:
                self._inputs[position] = torch.empty_like(tensor)
            own[name] = self._inputs[position]
            number = identity(tensor) if name in steady else None
            if number is None or self._copied.get(position) != number:
                own[name].copy_(tensor)
                if number is not None:
                    self._copied[position] = number
        return own
