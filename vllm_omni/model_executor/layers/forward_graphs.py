# SPDX-License-Identifier: Apache-2.0
"""`ForwardGraphs`: forwards that come again are launched as CUDA graphs instead of kernel by kernel.

A graph repeats the host's decisions at its capture, so a caller names all of them: the tensors that are read and
written in place (`places`), and in a key slots, lengths, branches. Tensors that differ from call to call are inputs,
copied to where the graph reads them; `steady` ones, whose numbers never change, only when another tensor comes.
A stream whose K/V ring is full comes back to the same slots after one turn of the ring, and a session that takes the
ring of one that has ended (`KeptMemory`) begins at its slots: a handful of graphs serves them for ever.

A key's first forward at its places runs as it is (and compiles lazy parts), its second is captured, later ones are
replayed. Once a whole forward of some kind has run, its keys are captured at their first, so that a new session does
not begin with launches kernel by kernel. A forward that cannot be captured runs as it is, from then on.
All graphs share one memory pool and the place of their results, since only one runs at a time.

A forward is one graph, or several with calls between them that no graph may hold (`between_graphs`): collectives, which
stop the devices when NCCL's kernels are replayed. A rank that replays and one that does not yet still meet in each.
Why not vLLM's `CUDAGraphWrapper`: it keys graphs by the number of tokens, and a forward here also
depends on slots and lengths of K/V rings.
Held by tests/model_executor/layers/test_forward_graphs.py.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from vllm_omni.model_executor.layers.kept_memory import KeptMemory

logger = logging.getLogger("vllm." + __name__)

Inputs = dict[str, torch.Tensor]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Replay]]
"""Record a forward; returns the tensor its result will be in, and the call that runs it."""

_STALE: Final = 8
"""A graph is out of use when so many times the capacity have been replayed since: a turn of a ring takes 2 to 4."""


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


def kept_buffer(name: str, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor, contiguous; in a capture the same for all calls of a name, shape and type.

    So its content must be used before the next call. (A tensor for each would keep its memory for ever.)
    dtype: None = of `like`.
    """
    dtype = dtype or like.dtype
    if _recording is None:
        return like.new_empty(shape, dtype=dtype)
    return _recording.buffer(name, tuple(shape), dtype, like.device)


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

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (name, shape, dtype, device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=dtype, device=device)
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
        current = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream(priority=current.priority)  # which its kernels keep
        self._stream.wait_stream(current)
        recording = _Recording(self._pool, self._buffers)
        with torch.cuda.stream(self._stream):
            recording.begin()
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
    """output: where `replay` writes its result, as others do. last_used: number of the newest replay."""

    output: torch.Tensor
    replay: Replay
    places: tuple[TensorWeakRef, ...]
    last_used: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether a tensor that it reads and writes is gone."""
        return any(place() is None for place in self.places)


class ForwardGraphs:
    """capacity: graphs kept. Those whose places are gone make room for others, then those out of use; while all others
    are in use, a new forward runs as it is. (A graph is not worth a capture if it is gone before it is needed again.)
    """

    def __init__(self, capacity: int = 128, capture: Capture | None = None) -> None:
        self.kept: KeptMemory[Any] = KeptMemory()
        """Of ended requests and sessions, whose graphs wait for new ones."""
        self._capacity = capacity
        self._capture = capture or CudaCapture()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()  # the one unused for longest first
        self._replays = 0
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._kinds: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._inputs: dict[Hashable, torch.Tensor] = {}
        self._copied: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def __call__(
        self,
        key: Hashable | None,
        inputs: Mapping[str, torch.Tensor],
        forward: Callable[[Inputs], torch.Tensor],
        *,
        places: Sequence[torch.Tensor] = (),
        kind: Hashable | None = None,
        whole: bool = True,
        steady: Collection[str] = (),
    ) -> torch.Tensor:
        """Return `forward(inputs)`, by a graph if this `key` or `kind` came before.

        key: None = never by a graph. places: the tensors that are read and written in place. kind: equal where the
        same kernels run; None = it cannot be told. whole: it runs all kernels of its kind. steady: names of inputs that
        nobody writes to once they are made.
        """
        shapes = tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in inputs.items())
        key = None if key is None else (key, tuple(identity(place) for place in places), shapes)
        if key is None or key in self._refused:
            return forward(dict(inputs))
        graph = self._graphs.get(key)
        if graph is None:
            again = self._came_before(key, None if kind is None else (kind, shapes), whole)
            if not (again and self._has_room()):
                return forward(dict(inputs))
        own = self._own(inputs, steady)
        if graph is None:
            try:
                output, replay = self._capture(lambda: kept_copy("result", forward(own)))
            except Exception:
                logger.exception("a forward could not be captured as a CUDA graph; it will be launched as it is")
                self._refused.add(key)
                return forward(dict(inputs))
            graph = self._graphs[key] = _Graph(output, replay, tuple(TensorWeakRef(place) for place in places))
            self._seen.pop(key, None)
        self._replays += 1
        graph.last_used = self._replays
        self._graphs.move_to_end(key)
        graph.replay()
        return graph.output.clone()

    def forget(self) -> None:
        """Drop every graph, and the kept memory: the tensors that graphs read may have moved."""
        self.kept.trim(0)
        self._graphs.clear()
        self._seen.clear()
        self._kinds.clear()
        self._refused.clear()
        self._inputs.clear()
        self._copied.clear()
        if isinstance(self._capture, CudaCapture):
            self._capture = CudaCapture()  # a pool ends with its last graph

    def _came_before(self, key: Hashable, kind: Hashable | None, whole: bool) -> bool:
        """Whether a forward of this key or kind has run; notes that one does now."""
        again = key in self._seen or kind in self._kinds
        self._seen[key] = None
        self._seen.move_to_end(key)
        while len(self._seen) > _STALE * self._capacity:
            self._seen.popitem(last=False)
        if kind is not None and whole:
            self._kinds.add(kind)
        return again

    def _has_room(self) -> bool:
        """Make room for one more graph, if there is none; whether there is now."""
        if len(self._graphs) < self._capacity:
            return True
        for key in [key for key, graph in self._graphs.items() if graph.is_dead]:
            del self._graphs[key]
        if len(self._graphs) == self._capacity:
            key, oldest = next(iter(self._graphs.items()))
            if self._replays - oldest.last_used > _STALE * self._capacity:
                del self._graphs[key]
        return len(self._graphs) < self._capacity

    def _own(self, inputs: Mapping[str, torch.Tensor], steady: Collection[str]) -> Inputs:
        """The tensors that graphs read, holding `inputs`; the same for all graphs, of which one runs at a time."""
        own: Inputs = {}
        for name, tensor in inputs.items():
            place = (name, tensor.shape, tensor.dtype, tensor.device)
            if place not in self._inputs:
                self._inputs[place] = torch.empty_like(tensor)
            own[name] = self._inputs[place]
            number = identity(tensor) if name in steady else None
            if number is None or self._copied.get(place) != number:
                own[name].copy_(tensor)
                if number is not None:
                    self._copied[place] = number
        return own
