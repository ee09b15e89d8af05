# SPDX-License-Identifier: Apache-2.0
"""The adapters that are active in the current forward pass. They are stored in a global variable,
because a process runs one forward pass at a time, on one thread.

`AdapterStore.applied` sets the active adapters. The adapted layers read them, and so does every
cache whose results depend on the weights.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ActiveAdapter:
    """An adapter that is active in the current forward pass."""

    slot: int
    """Index of the slot that holds the adapter."""
    layout: int
    """A key that is equal for adapters that change the same modules with the same LoRA ranks. Such
    adapters occupy the same memory in a slot.
    """
    version: int
    """Version number that identifies the adapter's weights, regardless of the slot that holds them.
    """
    scale: float
    """Strength of the adapter."""


_active: tuple[ActiveAdapter, ...] = ()


def active_adapters() -> tuple[ActiveAdapter, ...]:
    """Return the adapters that are active in the current forward pass, or () if it uses only the
    checkpoint's weights.
    """
    return _active


def weights_key() -> Hashable:
    """Return a key that is equal for two forward passes if and only if their weights are equal."""
    return tuple((adapter.version, adapter.scale) for adapter in _active)


def addresses_key() -> Hashable:
    """Return a key that is equal for two forward passes if and only if they read the same memory.

    Weights and strengths may still differ between the passes, because they are values in device
    memory.
    """
    return tuple((adapter.slot, adapter.layout) for adapter in _active)


@contextmanager
def using(adapters: Sequence[ActiveAdapter]) -> Iterator[None]:
    global _active
    before, _active = _active, tuple(adapters)
    try:
        yield
    finally:
        _active = before
