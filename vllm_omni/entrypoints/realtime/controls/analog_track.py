# SPDX-License-Identifier: Apache-2.0
"""`AnalogTrack`: holds the values of a client's axes and wheel until they are sampled for the next
chunk.

A `rate` axis keeps its value until it changes. Distances on a `motion` axis are summed until a
chunk starts. The sum is spread evenly over the chunk's frames and clamped to the range that a frame
allows, so the motion ends when the user stops. Wheel notches are summed in the same way. Each frame
gets at most one notch, starting with the first frame, and surplus notches are dropped. This module
contains only data, which `stream_state.py` serializes.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from vllm_omni.actions import CAMERA_SPACE, ActionSpace

MAX_WAITING: Final = 1024
"""Maximum number of motion events that may wait for one chunk."""

EventId = int | str


class AnalogEvent(msgspec.Struct, frozen=True):
    """A client's input event."""

    order: int
    """Position of the event in the session's arrival order."""
    event_id: EventId | None
    """Id that the client assigned to the event. None: the client sent no id."""


class _Rate(msgspec.Struct):
    value: float
    """Current value of the axis."""
    event: AnalogEvent
    """Event that set the value."""
    is_new: bool = True
    """Whether no chunk has used the value yet."""


class AnalogTrack(msgspec.Struct):
    """State of one session's axes and wheel."""

    space: ActionSpace = CAMERA_SPACE
    """The model's controls."""
    _rates: dict[str, _Rate] = msgspec.field(default_factory=dict)
    """Current value of each rate axis, by name."""
    _moved: dict[str, float] = msgspec.field(default_factory=dict)
    """Distance moved on each motion axis since the last sample, by name."""
    _notches: float = 0.0
    """Number of notches by which the wheel has been turned since the last sample."""
    _movers: dict[int, AnalogEvent] = msgspec.field(default_factory=dict)
    """Events that contributed to `_moved` or `_notches`, in order of arrival."""

    @property
    def is_at_rest(self) -> bool:
        """Whether no value is waiting for the next chunk and no event is active."""
        return not (self._rates or self._movers)

    @property
    def is_full(self) -> bool:
        return len(self._movers) >= MAX_WAITING

    def push(
        self, axes: Mapping[str, float], scroll: float, event: AnalogEvent
    ) -> list[AnalogEvent]:
        """Apply one transition. The names of its axes must be in the action space.

        Returns:
            Events whose rates the transition replaces.
        """
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

    def clear(self) -> list[AnalogEvent]:
        """Reset all values.

        Returns:
            Events that the reset interrupts.
        """
        cut = [*self._movers.values(), *(rate.event for rate in self._rates.values())]
        self._rates.clear()
        self._moved.clear()
        self._movers.clear()
        self._notches = 0.0
        return cut

    @property
    def waiting(self) -> list[AnalogEvent]:
        """Events that have not yet taken full effect."""
        return [
            *self._movers.values(),
            *(rate.event for rate in self._rates.values() if rate.is_new),
        ]

    @property
    def holding(self) -> list[AnalogEvent]:
        """Events whose rates remain active."""
        return [rate.event for rate in self._rates.values() if rate.value]

    def sample(
        self, latent_frames: int, events: list[AnalogEvent]
    ) -> list[tuple[dict[str, float], float]]:
        """Return and consume the values for each frame of the next chunk.

        Args:
            latent_frames: Number of latent frames in the chunk.
            events: List to which the events that take effect are appended.

        Returns:
            `(axes, scroll)` for each latent frame.
        """
        events += [*self._movers.values(), *(rate.event for rate in self._rates.values())]
        steady = {name: rate.value for name, rate in self._rates.items() if rate.value}
        for axis in self.space.axes:
            if moved := self._moved.get(axis.name):
                steady[axis.name] = min(axis.high, max(axis.low, moved / latent_frames))
        sign = (self._notches > 0) - (self._notches < 0)
        scrolled = [
            float(sign) if number < abs(self._notches) else 0.0 for number in range(latent_frames)
        ]
        for rate in self._rates.values():
            rate.is_new = False
        self._moved.clear()
        self._movers.clear()
        self._notches = 0.0
        return [(dict(steady), scroll) for scroll in scrolled]
