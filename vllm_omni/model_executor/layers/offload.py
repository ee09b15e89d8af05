# SPDX-License-Identifier: Apache-2.0
"""`LayerOffloader`: keeps linear layers' weights in host memory and copies them to the device just
before they are used.

A network passes its blocks to vLLM's `get_offloader().wrap_modules`, as vLLM's own models do. The
runner installs this offloader before it builds a model. After loading, `--cpu-offload-gb`
determines how many bytes of linear-layer weights remain on the host. The layers that remain there
are spread evenly over the blocks of all networks, so weights are fetched at an even rate during a
forward pass.

A layer's weights are copied into one of a few device slots while earlier layers run. Weights are
prefetched in the order in which the layers ran in the previous forward pass. This order does not
have to be specified, and may differ from the construction order. If the order changes (for example,
because two experts alternate or the K/V of a new prompt are computed), the first layer's weights
arrive late, but the result is still correct. Whether or not a layer is offloaded, it runs the same
kernels and returns bitwise-identical results.

vLLM's own two offloaders are not used. With vLLM's UVA offloader, a matrix product reads the
weights over the bus once per tile of tokens. vLLM's prefetch offloader supports only one list of
layers, which must run in a fixed order.
"""

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.offloader import BaseOffloader, should_pin_memory

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext

logger = logging.getLogger("vllm." + __name__)

_AHEAD = 3
"""Number of layers to prefetch. Prefetching one layer is not enough, because a small layer may
finish running before the next, larger layer has been copied.
"""
_ARENA_BYTES = 1 << 30
"""Size of a pinned allocation in bytes. It is a power of two, because torch's pinned allocator
rounds sizes up to powers of two."""
_ALIGNMENT = 256
"""Alignment of each tensor in its layer's memory, in bytes. CUDA's own allocator uses the same
alignment."""


@dataclass(frozen=True)
class _Stored:
    """The location of one parameter in its layer's memory."""

    name: str
    """Name of the parameter in its layer."""
    start: int
    """Byte offset of the parameter from the start of the layer's memory."""
    dtype: torch.dtype
    """Dtype of the parameter."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    stride: tuple[int, ...]
    """Strides of the parameter in elements."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, room: torch.Tensor) -> torch.Tensor:
        """Return this parameter as a view of `room`, a byte tensor."""
        typed = room[self.start : self.start + self.nbytes].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset())


def _layout(layer: nn.Module) -> tuple[_Stored, ...]:
    """Return the location of each parameter in a layer's contiguous memory."""
    stored, start = [], 0
    for name, parameter in layer.named_parameters(recurse=False):
        tensor = parameter.data
        stride = (
            tensor.stride()
            if _is_dense(tensor)
            else torch.empty(tensor.shape, device="meta").stride()
        )
        stored.append(_Stored(name, start, tensor.dtype, tuple(tensor.shape), tuple(stride)))
        start += -(-stored[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(stored)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a contiguous block of memory, with the dimensions in any
    order.
    """
    reach = 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.numel() == reach


@dataclass(eq=False)
class _Slot:
    """Device memory for the weights of one layer."""

    room: torch.Tensor
    """The slot's device memory, as a byte tensor."""
    arrived: torch.cuda.Event | None
    """Event recorded after the copy from the host. None on CPUs."""
    read: torch.cuda.Event | None
    """Event recorded after the last kernel that reads the slot. None on CPUs."""
    layer: "_Layer | None" = None
    """The layer whose weights are in the slot."""


@dataclass(eq=False)
class _Layer:
    """A layer whose weights are in host memory."""

    layer: nn.Module
    """The layer, a vLLM linear layer."""
    stored: tuple[_Stored, ...]
    """Location of each parameter in `room`."""
    room: torch.Tensor
    """Host memory that holds the weights, as a byte tensor."""
    views: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """The parameters as views of each memory block, keyed by the block's id."""
    following: "_Layer | None" = None
    """The layer that ran after this one in the previous forward pass."""

    @property
    def nbytes(self) -> int:
        return self.room.numel()

    def show(self, room: torch.Tensor) -> None:
        """Point the layer's parameters at the bytes of `room`."""
        if id(room) not in self.views:
            self.views[id(room)] = {one.name: one.view(room) for one in self.stored}
        for name, view in self.views[id(room)].items():
            parameter = getattr(self.layer, name)
            parameter.data = view

    def copy_to_host(self) -> None:
        """Copy the parameters to host memory if they are not already there, for example because
        they were reloaded on the device.
        """
        for one in self.stored:
            data, home = getattr(self.layer, one.name).data, one.view(self.room)
            if data.data_ptr() != home.data_ptr():
                home.copy_(data)
        self.show(self.room)


class _Copies:
    """Copies weights into a slot synchronously. On CUDA, `_StreamCopies` overlaps the copy with
    computation.
    """

    def new_slot(self, nbytes: int, device: torch.device) -> _Slot:
        return _Slot(torch.empty(nbytes, dtype=torch.uint8, device=device), None, None)

    def fetch(self, layer: _Layer, slot: _Slot) -> None:
        slot.room[: layer.nbytes].copy_(layer.room)

    def wait(self, slot: _Slot) -> None:
        """Make later kernels wait until the slot contains the layer's weights."""

    def mark_read(self, slot: _Slot) -> None:
        """Record that the kernels launched so far are the last ones to read the slot."""


class _StreamCopies(_Copies):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def new_slot(self, nbytes: int, device: torch.device) -> _Slot:
        room = torch.empty(nbytes, dtype=torch.uint8, device=device)
        slot = _Slot(room, torch.cuda.Event(), torch.cuda.Event())
        self.mark_read(slot)
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

    def mark_read(self, slot: _Slot) -> None:
        assert slot.read is not None
        slot.read.record(torch.cuda.current_stream())


class LayerOffloader(BaseOffloader):
    """Keeps the weights of linear layers in host memory, up to a budget.

    Args:
        budget_bytes: Maximum size of the weights on the host, in bytes.
        device: Device on which the layers run.
        load_on_host: Whether to load all layers on the host first and then move the layers that
            exceed the budget to the device. Otherwise, all layers are first loaded on the device,
            which must temporarily hold all of them.
    """

    def __init__(
        self, budget_bytes: int, device: torch.device, *, load_on_host: bool = True
    ) -> None:
        self._budget_bytes, self._device, self._load_on_host = budget_bytes, device, load_on_host
        self._copies = _StreamCopies(device) if device.type == "cuda" else _Copies()
        self._wrapped: list[nn.Module] = []
        self._layers: list[_Layer] = []
        self._slots: list[_Slot] = []  # least recently used first
        self._last: _Layer | None = None

    @property
    def host_bytes(self) -> int:
        """Return the size of the weights that remain on the host, in bytes."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def slot_bytes(self) -> int:
        return sum(slot.room.numel() for slot in self._slots)

    def wrap_modules(
        self, modules_generator: Generator[nn.Module, None, None], prefix: str = ""
    ) -> list[nn.Module]:
        """Register a network's blocks. Each block is moved to the host before the next block is
        built.
        """
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
        """Move each layer to the host or the device. The runner calls this method after loading and
        after each reload.

        Raises:
            ValueError: No layer would remain on the host.
        """
        if not self._layers:
            self._choose()
        for layer in self._layers:
            layer.copy_to_host()
        for slot in self._slots:
            slot.layer = None

    def _choose(self) -> None:
        """Choose the layers that remain on the host, and allocate slots for them."""
        sizes = [_nbytes(_layout(layer)) for layer in self._wrapped]
        chosen = spread(sizes, self._budget_bytes)
        if not any(chosen):
            raise ValueError(
                f"--cpu-offload-gb {self._budget_bytes / 2**30:g} leaves nothing on the host: its "
                "smallest layer takes "
                f"{min(sizes) / 2**30:.2g} GiB"
                if sizes
                else "--cpu-offload-gb: this model has no layers for it; drop it"
            )
        rooms = _Rooms(
            sum(size for size, on_host in zip(sizes, chosen, strict=True) if on_host), self._device
        )
        for layer, size, on_host in zip(self._wrapped, sizes, chosen, strict=True):
            if on_host:
                remaining = _Layer(layer, _layout(layer), rooms.take_bytes(size))
                remaining.copy_to_host()
                layer.register_forward_pre_hook(
                    lambda module, inputs, retained=remaining: self._enter(retained)
                )
                layer.register_forward_hook(
                    lambda module, inputs, y, retained=remaining: self._leave(retained),
                    always_call=True,
                )
                self._layers.append(remaining)
            else:
                _move(layer, self._device)
        largest = max(layer.nbytes for layer in self._layers)
        slots = min(1 + _AHEAD, len(self._layers))
        self._slots = [self._copies.new_slot(largest, self._device) for _ in range(slots)]
        logger.info(
            "%.2f of %.2f GiB of blocks' weights lie in host memory, %d of %d layers; %.2f GiB of "
            "the device are slots",
            self.host_bytes / 2**30,
            sum(sizes) / 2**30,
            len(self._layers),
            len(self._wrapped),
            self.slot_bytes / 2**30,
        )

    def _enter(self, layer: _Layer) -> None:
        """Before a layer runs, wait for its weights and start copying the weights of the next
        layers.
        """
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
        slot = next(slot for slot in self._slots if slot.layer is layer)
        self._copies.mark_read(slot)
        layer.show(layer.room)

    def _slot_of(self, layer: _Layer) -> _Slot:
        """Return the slot that holds the layer's weights, after copying them into a slot if
        necessary. The slot becomes the most recently used one.
        """
        slot = next((slot for slot in self._slots if slot.layer is layer), self._slots[0])
        if slot.layer is not layer:
            slot.layer = layer
            self._copies.fetch(layer, slot)
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot


class _Rooms:
    """Allocates host memory for consecutive layers. The memory is pinned if there is a device to
    copy to.
    """

    def __init__(self, total_bytes: int, device: torch.device) -> None:
        self._left = total_bytes
        self._pinned = device.type == "cuda" and should_pin_memory()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def take_bytes(self, nbytes: int) -> torch.Tensor:
        if len(self._arena) < nbytes:
            size = max(nbytes, min(_ARENA_BYTES, self._left))
            self._arena = torch.empty(
                size, dtype=torch.uint8, pin_memory=self._pinned, device="cpu"
            )
        room, self._arena = self._arena[:nbytes], self._arena[nbytes:]
        self._left -= nbytes
        return room


def spread(sizes: Sequence[int], budget: int) -> list[bool]:
    """Choose the layers that remain on the host. The chosen layers occupy at most `budget` bytes in
    total and are spread evenly over the list.
    """
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


def offloader_for(
    vllm_config: VllmConfig, device: torch.device, parallel: ParallelContext
) -> LayerOffloader | None:
    """Return the offloader for `--cpu-offload-gb`, or None if the option is unset or this rank
    holds no layers.
    """
    gibibytes = vllm_config.offload_config.uva.cpu_offload_gb
    if gibibytes <= 0 or parallel.is_vae_stage:
        return None
    # With the `dummy` format, weights are generated on the device, because generating them on the
    # host takes minutes.
    load_on_host = vllm_config.load_config.load_format != "dummy"
    return LayerOffloader(int(gibibytes * 2**30), device, load_on_host=load_on_host)
