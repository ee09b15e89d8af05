# SPDX-License-Identifier: Apache-2.0
"""Which adapters the current forward uses. One for a process: its forwards run one after the other, on one thread.

Set by `AdapterStore.applied`; read by the sites, and by whatever keeps a result that depends on weights.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ActiveAdapter:
    """slot: where it lies. layout: equal for adapters that change the same modules at the same ranks, so that one takes
    exactly the memory of the other in a slot. version: of its weights, the same wherever they lie. scale: its strength.
    """

    slot: int
    layout: int
    version: int
    scale: float


_active: tuple[ActiveAdapter, ...] = ()


def active_adapters() -> tuple[ActiveAdapter, ...]:
    """The adapters of the current forward; () = the model as its checkpoint has it."""
    return _active


def weights_key() -> Hashable:
    """Equal for two forwards exactly if their weights are."""
    return tuple((adapter.version, adapter.scale) for adapter in _active)


def addresses_key() -> Hashable:
    """Equal for two forwards exactly if they read the same memory: weights and strengths are numbers on the device."""
    return tuple((adapter.slot, adapter.layout) for adapter in _active)


@contextmanager
def using(adapters: Sequence[ActiveAdapter]) -> Iterator[None]:
    global _active
    before, _active = _active, tuple(adapters)
    try:
        yield
    finally:
        _active = before
