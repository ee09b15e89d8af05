# SPDX-License-Identifier: Apache-2.0
"""`AnalogTrack`: the values of a client's axes and wheel until the next chunk takes them.

A `rate` keeps its value until it changes. The distances of a `motion` are summed up until a chunk begins, which spreads
the sum evenly over its frames, each cut to the range of a frame, so that nothing moves on after the hand rests.
The wheel's notches are summed likewise and given out one a frame, from the first frame on; more than the chunk has
frames are dropped. Pure data. Held by tests/entrypoints/realtime/test_action_track.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from vllm_omni.actions import ActionSpace

MAX_WAITING: Final = 1024
"""Events whose motion may wait for one chunk."""

EventId = int | str


class Event(msgspec.Struct, frozen=True):
    """order: counts all events of the session. event_id: the client's, None = it gave none."""

    order: int
    event_id: EventId | None


@dataclass
class _Rate:
    value: float
    event: Event
    is_new: bool = True


@dataclass
class AnalogTrack:
    """Axes and wheel of one session."""

    space: ActionSpace
    _rates: dict[str, _Rate] = field(default_factory=dict)
    _moved: dict[str, float] = field(default_factory=dict)
    _notches: float = 0.0
    _movers: dict[int, Event] = field(default_factory=dict)

    @property
    def is_at_rest(self) -> bool:
        """Whether there is nothing for the next chunk, and no event at work."""
        return not (self._rates or self._movers)

    @property
    def is_full(self) -> bool:
        return len(self._movers) >= MAX_WAITING

    def push(self, axes: Mapping[str, float], scroll: float, event: Event) -> list[Event]:
        """Take one transition; returns the events whose rates it replaces. The names are of the space."""
        replaced = []
        kinds = {axis.name: axis.kind for axis in self.space.axes}
        for name, value in axes.items():
            if kinds[name] == "motion":
                self._moved[name] = self._moved.get(name, 0.0) + value
                self._movers[event.order] = event
                continue
            if (before := self._rates.get(name)) is not None:
                replaced.append(before.event)
            self._rates[name] = _Rate(value, event)
        if scroll:
            self._notches += scroll
            self._movers[event.order] = event
        return replaced

    def clear(self) -> list[Event]:
        """Everything rests; returns the events that this cuts off."""
        cut = [*self._movers.values(), *(rate.event for rate in self._rates.values())]
        self._rates.clear()
        self._moved.clear()
        self._movers.clear()
        self._notches = 0.0
        return cut

    @property
    def waiting(self) -> list[Event]:
        """Events of which some part is still to act."""
        return [*self._movers.values(), *(rate.event for rate in self._rates.values() if rate.is_new)]

    @property
    def holding(self) -> list[Event]:
        """Events whose rates go on."""
        return [rate.event for rate in self._rates.values() if rate.value]

    def sample(self, latent_frames: int, events: list[Event]) -> list[tuple[dict[str, float], float]]:
        """Return and consume `(axes, scroll)` of each frame of the next chunk; adds the events at work to `events`."""
        events += [*self._movers.values(), *(rate.event for rate in self._rates.values())]
        steady = {name: rate.value for name, rate in self._rates.items() if rate.value}
        for axis in self.space.axes:
            if moved := self._moved.get(axis.name):
                steady[axis.name] = min(axis.high, max(axis.low, moved / latent_frames))
        sign = (self._notches > 0) - (self._notches < 0)
        scrolled = [float(sign) if number < abs(self._notches) else 0.0 for number in range(latent_frames)]
        for rate in self._rates.values():
            rate.is_new = False
        self._moved.clear()
        self._movers.clear()
        self._notches = 0.0
        return [(dict(steady), scroll) for scroll in scrolled]
