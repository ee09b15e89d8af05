# SPDX-License-Identifier: Apache-2.0
"""`LayerOffloader`: linear layers whose weights lie in host memory and are on the device only around their use.

A network hands its blocks to vLLM's `get_offloader().wrap_modules`, as vLLM's models do; the runner sets this offloader
before it builds a model. After loading, `--cpu-offload-gb` decides how much of their linear layers stays on the host,
spread evenly over all blocks of all networks, so that every forward fetches about as much per millisecond.

A layer's weights are copied into one of a few slots on the device while the layers before it compute. The next layers
are those that came next the last time, so the order needs no description and may differ from that of construction: with
two experts in turns, or keys and values of a new prompt in between, the first layer after a change comes late, never
wrong. A layer computes with the same bits in the same kernels as without an offloader.

vLLM's own two do not serve here: with UVA a product reads its weights over the bus once for every tile of tokens, and
prefetching knows one list of layers, always in the same order, and none outside of it.
Held by tests/model_executor/layers/test_offload.py.
"""

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.offloader import BaseOffloader, should_pin_memory

from vllm_omni.model_executor.layers.parallel import ParallelContext

logger = logging.getLogger("vllm." + __name__)

_AHEAD = 3
"""Layers that are fetched while one computes: a short one may stand before a long one."""
_ARENA_BYTES = 1 << 30
"""Of pinned memory at a time: its allocator rounds up to a power of two."""
_ALIGNMENT = 256
"""Of a tensor in its layer's bytes, as CUDA's own allocator aligns."""


@dataclass(frozen=True)
class _Stored:
    """One parameter in the bytes of its layer."""

    name: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, room: torch.Tensor) -> torch.Tensor:
        """This parameter in `room`, bytes."""
        typed = room[self.start : self.start + self.nbytes].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset())


def _layout(layer: nn.Module) -> tuple[_Stored, ...]:
    """Where a layer's parameters lie in its bytes, one behind the other."""
    stored, start = [], 0
    for name, parameter in layer.named_parameters(recurse=False):
        tensor = parameter.data
        stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        stored.append(_Stored(name, start, tensor.dtype, tuple(tensor.shape), tuple(stride)))
        start += -(-stored[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(stored)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory, in any order of dimensions."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == reach


@dataclass(eq=False)
class _Slot:
    """Device memory for one layer. arrived: of its copy; read: of the last kernel that reads it (None on a CPU)."""

    room: torch.Tensor
    arrived: torch.cuda.Event | None
    read: torch.cuda.Event | None
    holds: "_Layer | None" = None


@dataclass(eq=False)
class _Layer:
    """A layer on the host. room: its bytes there. following: the one that was used after it the last time."""

    layer: nn.Module
    stored: tuple[_Stored, ...]
    room: torch.Tensor
    views: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    following: "_Layer | None" = None

    @property
    def nbytes(self) -> int:
        return self.room.numel()

    def show(self, room: torch.Tensor) -> None:
        """Let the layer's parameters be those in `room`."""
        if id(room) not in self.views:
            self.views[id(room)] = {one.name: one.view(room) for one in self.stored}
        for name, view in self.views[id(room)].items():
            parameter = getattr(self.layer, name)
            parameter.data = view

    def take_home(self) -> None:
        """Copy parameters that are elsewhere (new ones, or loaded anew on the device) to the host."""
        for one in self.stored:
            data, home = getattr(self.layer, one.name).data, one.view(self.room)
            if data.data_ptr() != home.data_ptr():
                home.copy_(data)
        self.show(self.room)


class _Copies:
    """How weights reach a slot: at once. On CUDA beside the computation (`_StreamCopies`)."""

    def new_slot(self, nbytes: int, device: torch.device) -> _Slot:
        return _Slot(torch.empty(nbytes, dtype=torch.uint8, device=device), None, None)

    def fetch(self, layer: _Layer, slot: _Slot) -> None:
        slot.room[: layer.nbytes].copy_(layer.room)

    def wait(self, slot: _Slot) -> None:
        """Kernels launched from now on find the weights in the slot."""

    def leave(self, slot: _Slot) -> None:
        """Kernels launched until now were the last to read the slot."""


class _StreamCopies(_Copies):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def new_slot(self, nbytes: int, device: torch.device) -> _Slot:
        room = torch.empty(nbytes, dtype=torch.uint8, device=device)
        slot = _Slot(room, torch.cuda.Event(), torch.cuda.Event())
        self.leave(slot)
        return slot

    def fetch(self, layer: _Layer, slot: _Slot) -> None:
        assert slot.arrived is not None and slot.read is not None
        self._stream.wait_event(slot.read)
        with torch.cuda.stream(self._stream):
            slot.room[: layer.nbytes].copy_(layer.room, non_blocking=True)
            slot.arrived.record(self._stream)

    def wait(self, slot: _Slot) -> None:
        assert slot.arrived is not None
        torch.cuda.current_stream().wait_event(slot.arrived)

    def leave(self, slot: _Slot) -> None:
        assert slot.read is not None
        slot.read.record(torch.cuda.current_stream())


class LayerOffloader(BaseOffloader):
    """budget_bytes: of weights on the host, at most. load_on_host: layers are loaded there, and those beyond the budget
    move to the device afterwards; else they are loaded on the device, which must then hold them all for a while.
    """

    def __init__(self, budget_bytes: int, device: torch.device, *, load_on_host: bool = True) -> None:
        self._budget_bytes, self._device, self._load_on_host = budget_bytes, device, load_on_host
        self._copies = _StreamCopies(device) if device.type == "cuda" else _Copies()
        self._wrapped: list[nn.Module] = []
        self._layers: list[_Layer] = []
        self._slots: list[_Slot] = []  # the one that was used the longest ago first
        self._last: _Layer | None = None

    @property
    def host_bytes(self) -> int:
        """Of weights that the device does not hold."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def slot_bytes(self) -> int:
        return sum(slot.room.numel() for slot in self._slots)

    def wrap_modules(self, modules_generator: Generator[nn.Module, None, None], prefix: str = "") -> list[nn.Module]:
        """Take note of a network's blocks; each is on the host before the next one is made."""
        modules = []
        for module in modules_generator:
            modules.append(module)
            for layer in module.modules():
                if isinstance(layer, LinearBase):
                    self._wrapped.append(layer)
                    if self._load_on_host:
                        _move(layer, torch.device("cpu"))
        return modules

    def post_init(self) -> None:
        """Put every layer in its place, after loading and after each reload. Raises ValueError if none is left."""
        if not self._layers:
            self._choose()
        for layer in self._layers:
            layer.take_home()
        for slot in self._slots:
            slot.holds = None

    def _choose(self) -> None:
        """Decide which layers lie on the host, and make slots for them."""
        sizes = [_nbytes(_layout(layer)) for layer in self._wrapped]
        chosen = spread(sizes, self._budget_bytes)
        if not any(chosen):
            raise ValueError(
                f"--cpu-offload-gb {self._budget_bytes / 2**30:g} leaves nothing on the host: its smallest layer takes "
                f"{min(sizes) / 2**30:.2g} GiB"
                if sizes
                else "--cpu-offload-gb: this model has no layers for it; drop it"
            )
        rooms = _Rooms(sum(size for size, on_host in zip(sizes, chosen, strict=True) if on_host), self._device)
        for layer, size, on_host in zip(self._wrapped, sizes, chosen, strict=True):
            if on_host:
                kept = _Layer(layer, _layout(layer), rooms.take(size))
                kept.take_home()
                layer.register_forward_pre_hook(lambda module, inputs, kept=kept: self._enter(kept))
                layer.register_forward_hook(lambda module, inputs, y, kept=kept: self._leave(kept), always_call=True)
                self._layers.append(kept)
            else:
                _move(layer, self._device)
        largest = max(layer.nbytes for layer in self._layers)
        slots = min(1 + _AHEAD, len(self._layers))
        self._slots = [self._copies.new_slot(largest, self._device) for _ in range(slots)]
        logger.info(
            "%.2f of %.2f GiB of blocks' weights lie in host memory, %d of %d layers; %.2f GiB of the device are slots",
            self.host_bytes / 2**30,
            sum(sizes) / 2**30,
            len(self._layers),
            len(self._wrapped),
            self.slot_bytes / 2**30,
        )

    def _enter(self, layer: _Layer) -> None:
        """Before a layer computes: wait for its weights, and begin to fetch those of the next layers."""
        slot = self._slot_of(layer)
        self._copies.wait(slot)
        layer.show(slot.room)
        if self._last is not None:
            self._last.following = layer
        self._last, ahead = layer, layer.following
        for _ in range(len(self._slots) - 1):
            if ahead is None or ahead is layer:
                break
            self._slot_of(ahead)
            ahead = ahead.following

    def _leave(self, layer: _Layer) -> None:
        slot = next(slot for slot in self._slots if slot.holds is layer)
        self._copies.leave(slot)
        layer.show(layer.room)

    def _slot_of(self, layer: _Layer) -> _Slot:
        """The slot that holds a layer, or that it is fetched into from now on; it becomes the newest."""
        slot = next((slot for slot in self._slots if slot.holds is layer), self._slots[0])
        if slot.holds is not layer:
            slot.holds = layer
            self._copies.fetch(layer, slot)
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot


class _Rooms:
    """Host memory in which layers lie one behind the other, pinned where there is a device to copy to."""

    def __init__(self, total_bytes: int, device: torch.device) -> None:
        self._left = total_bytes
        self._pinned = device.type == "cuda" and should_pin_memory()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        if len(self._arena) < nbytes:
            size = max(nbytes, min(_ARENA_BYTES, self._left))
            self._arena = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")
        room, self._arena = self._arena[:nbytes], self._arena[nbytes:]
        self._left -= nbytes
        return room


def spread(sizes: Sequence[int], budget: int) -> list[bool]:
    """Which of the layers of these sizes lie on the host: at most `budget` bytes of them, evenly over the list."""
    total, budget = sum(sizes), min(budget, sum(sizes))
    chosen, seen, taken = [], 0, 0
    for size in sizes:
        seen += size
        chosen.append((taken + size) * total <= budget * seen)
        taken += size * chosen[-1]
    return chosen


def _nbytes(stored: Sequence[_Stored]) -> int:
    return stored[-1].start + -(-stored[-1].nbytes // _ALIGNMENT) * _ALIGNMENT if stored else 0


def _move(layer: nn.Module, device: torch.device) -> None:
    for parameter in layer.parameters(recurse=False):
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def offloader_for(vllm_config: VllmConfig, device: torch.device, place: ParallelContext) -> LayerOffloader | None:
    """The offloader that `--cpu-offload-gb` asks for; None without it, and on a rank that holds no layer."""
    gibibytes = vllm_config.offload_config.uva.cpu_offload_gb
    if gibibytes <= 0 or place.is_vae_stage:
        return None
    # Random weights are made on the device: a host needs minutes for them.
    load_on_host = vllm_config.load_config.load_format != "dummy"
    return LayerOffloader(int(gibibytes * 2**30), device, load_on_host=load_on_host)
