# SPDX-License-Identifier: Apache-2.0
"""`ControlTrack`: collects a client's controls, and samples them for the next chunk.

Actions arrive as a script or as states. A script is a timeline with one frame of controls per
latent frame. No control is active after the script ends. States are transitions, for example "these
buttons are held". Held buttons remain held until they change, so no backlog can build up. A button
that is pressed and released between two chunks is still held for one latent frame. `AnalogTrack`
handles axes and the wheel. A script replaces pending transitions, and transitions replace a script.
Only the latest prompt and the latest LoRA adapters apply. All buffers are bounded.

This module contains only data, which `stream_state.py` serializes. It uses no sockets, clock or
engine.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from vllm_omni.actions import CAMERA_SPACE, ActionEntry, ActionFrame, ActionSpace, as_entry
from vllm_omni.entrypoints.realtime.controls.analog_track import AnalogEvent, AnalogTrack, EventId
from vllm_omni.inputs import Lora

MAX_SCRIPT_ENTRIES: Final = 512
_REMEMBERED_IDS: Final = 1024

Held = tuple[str, ...]
"""Buttons held during one latent frame. Empty: no buttons are held."""


class TooManyEvents(Exception):
    """Raised when too many events are waiting for the next chunk."""


class ControlScript(msgspec.Struct, frozen=True):
    """A timeline of controls with one entry per latent frame."""

    entries: tuple[ActionFrame, ...]
    """Controls for each latent frame."""


class ControlTransition(msgspec.Struct, frozen=True):
    """A change to the held buttons, axes or wheel."""

    buttons: Held | None = None
    """Buttons held after the change. None: the held buttons do not change."""
    axes: Mapping[str, float] = {}
    """New value of a rate axis, or distance on a motion axis, by axis name."""
    scroll: float = 0.0
    """Number of notches by which the wheel was turned."""


class ControlStates(msgspec.Struct, frozen=True):
    """A sequence of transitions in chronological order."""

    transitions: tuple[ControlTransition, ...]
    """Transitions, oldest first."""


class PromptChange(msgspec.Struct, frozen=True):
    """An update that sets a new prompt."""

    text: str
    """Prompt text."""


class AdapterChange(msgspec.Struct, frozen=True):
    """An update that sets new LoRA adapters."""

    choices: tuple[Lora, ...]
    """LoRA adapters to apply. Empty: no adapters are applied."""


Update = ControlScript | ControlStates | PromptChange | AdapterChange


class ControlSample(msgspec.Struct, frozen=True):
    """Controls sampled for one chunk."""

    actions: list[ActionEntry] | None = None
    """Actions with one entry per latent frame. None: the client has never sent actions."""
    prompt: str | None = None
    """New prompt. None: the prompt does not change."""
    lora: tuple[Lora, ...] | None = None
    """New LoRA adapters. None: the adapters do not change."""
    event_id: EventId | None = None
    """Id of the newest event that takes effect in this chunk. None: no event with an id takes
    effect.
    """
    is_new: bool = False
    """Whether `event_id` appears in a sample for the first time."""
    applied: tuple[EventId, ...] = ()
    """Ids of the events that take effect for the first time in this chunk."""
    active: tuple[EventId, ...] = ()
    """Ids of the events that remain in effect after this chunk."""


class ControlTrack(msgspec.Struct):
    """Collects one session's controls in arrival order. This class is not thread-safe; call `apply`
    and `sample` on the same event loop.
    """

    space: ActionSpace = CAMERA_SPACE
    """The model's controls. Every control in an update must be in this action space."""
    _script: list[tuple[ActionFrame, AnalogEvent]] = []
    """Remaining frames of the script, each with the event that sent it."""
    _transitions: list[tuple[Held, AnalogEvent]] = []
    """States of the held buttons since the last sample, each with the event that set it."""
    _held: Held = ()
    """Buttons held in the last frame of the last sample."""
    _held_by: AnalogEvent | None = None
    """Event that set `_held`."""
    _any_actions: bool = False
    """Whether the client has ever sent actions."""
    _prompt: tuple[str, AnalogEvent] | None = None
    """New prompt and the event that set it. None: no prompt is waiting."""
    _lora: tuple[tuple[Lora, ...], AnalogEvent] | None = None
    """New LoRA adapters and the event that set them. None: no adapters are waiting."""
    _num_events: int = 0
    """Number of events applied so far."""
    _newest_sent: int = -1
    """Largest order number among the events whose ids have been in a sample."""
    _acting: set[int] = msgspec.field(default_factory=set)
    """Order numbers of the events that were in effect in the last sample."""
    _seen: dict[EventId, None] = {}
    """Ids of the latest events, oldest first, to detect duplicates."""
    _analog: AnalogTrack = msgspec.field(default_factory=AnalogTrack)
    """State of the axes and the wheel."""

    def __post_init__(self) -> None:
        self._analog.space = self.space

    def is_repeated(self, event_id: EventId | None) -> bool:
        """Whether an event with this id has already been applied. If so, a repetition must have no
        effect.
        """
        return event_id is not None and event_id in self._seen

    def apply(self, updates: Iterable[Update], event_id: EventId | None = None) -> list[EventId]:
        """Apply one event.

        Args:
            updates: Updates that the event consists of, which are applied together.
            event_id: The client's id for the event.

        Returns:
            Ids of earlier events that will never take effect.

        Raises:
            TooManyEvents: Too many events are waiting, so none of the event's updates is applied.
        """
        updates = list(updates)
        if self._analog.is_full and any(_moves(update) for update in updates):
            raise TooManyEvents
        event = AnalogEvent(self._num_events, event_id)
        self._num_events += 1
        if event_id is not None:
            self._seen[event_id] = None
            while len(self._seen) > _REMEMBERED_IDS:
                del self._seen[next(iter(self._seen))]
        replaced: list[AnalogEvent] = []
        for update in updates:
            match update:
                case PromptChange(text):
                    replaced += [self._prompt[1]] if self._prompt is not None else []
                    self._prompt = (text, event)
                case AdapterChange(choices):
                    replaced += [self._lora[1]] if self._lora is not None else []
                    self._lora = (choices, event)
                case ControlScript(entries):
                    replaced += self._clear()
                    self._script.extend((frame, event) for frame in entries[:MAX_SCRIPT_ENTRIES])
                    self._any_actions = True
                case ControlStates(transitions):
                    replaced += [waiting for _, waiting in self._script]
                    self._script.clear()
                    replaced += self._push(transitions, event)
                    self._any_actions = True
        if not replaced:
            return []
        alive = self._acting | self._waiting()
        gone = [old for old in replaced if old.order not in alive and old.order != event.order]
        ids = {old.event_id: None for old in gone}
        return [old_id for old_id in ids if old_id is not None]

    def _waiting(self) -> set[int]:
        """Return the order numbers of the events that have not yet taken full effect."""
        if (
            not (self._script or self._transitions or self._prompt or self._lora)
            and self._analog.is_at_rest
        ):
            return set()  # the usual case after a chunk has sampled its controls
        events = [event for _, event in (*self._script, *self._transitions)]
        slots = [slot[1] for slot in (self._prompt, self._lora) if slot is not None]
        return {event.order for event in [*events, *self._analog.waiting, *slots]}

    def _push(
        self, transitions: tuple[ControlTransition, ...], event: AnalogEvent
    ) -> list[AnalogEvent]:
        """Append transitions, and return the events that they replace.

        Only the newest button state and the newest state in which any button is held are retained.
        """
        replaced = [old for _, old in self._transitions]
        for transition in transitions:
            if transition.buttons is not None:
                self._transitions.append((transition.buttons, event))
            if transition.axes or transition.scroll:
                replaced += self._analog.push(transition.axes, transition.scroll, event)
        if len(self._transitions) > 2:
            last = self._transitions[-1]
            pulse = next((item for item in reversed(self._transitions) if item[0]), last)
            self._transitions = [pulse, last] if pulse is not last else [last]
        if not replaced:
            return []
        retained = {item.order for _, item in self._transitions}
        return [old for old in replaced if old.order not in retained]

    def _clear(self) -> list[AnalogEvent]:
        replaced = [event for _, event in (*self._script, *self._transitions)]
        self._script.clear()
        self._transitions.clear()
        self._held, self._held_by = (), None
        return replaced + self._analog.clear()

    def sample(self, latent_frames: int, with_prompt: bool = True) -> ControlSample:
        """Return and consume the controls for the next chunk.

        Args:
            latent_frames: Number of latent frames in the chunk.
            with_prompt: Whether the chunk may change the prompt.
        """
        events: list[AnalogEvent] = []
        actions = self._sample_actions(latent_frames, events) if self._any_actions else None
        prompt = None
        if with_prompt and self._prompt is not None:
            prompt, event = self._prompt
            self._prompt = None
            events.append(event)
        lora = None
        if self._lora is not None:
            lora, event = self._lora
            self._lora = None
            events.append(event)
        newest: AnalogEvent | None = None
        named: dict[int, EventId] = {}
        for event in events:
            if event.event_id is None:
                continue
            named[event.order] = event.event_id
            if newest is None or event.order > newest.order:
                newest = event
        is_new = newest is not None and newest.order > self._newest_sent
        if is_new and newest is not None:
            self._newest_sent = newest.order
        lasting = self._lasting() if named else set()
        applied: list[EventId] = []
        active: list[EventId] = []
        for order in sorted(named):
            if order not in self._acting:
                applied.append(named[order])
            if order in lasting:
                active.append(named[order])
        self._acting = set(named)
        return ControlSample(
            actions=actions,
            prompt=prompt,
            lora=lora,
            event_id=newest.event_id if newest is not None else None,
            is_new=is_new,
            applied=tuple(applied),
            active=tuple(active),
        )

    def _lasting(self) -> set[int]:
        """Return the order numbers of the events that remain in effect after this chunk."""
        orders = self._waiting()
        if self._held_by is not None and self._held:
            orders.add(self._held_by.order)
        for event in self._analog.holding:
            orders.add(event.order)
        return orders

    def _sample_actions(self, latent_frames: int, events: list[AnalogEvent]) -> list[ActionEntry]:
        if self._script:
            taken, self._script = self._script[:latent_frames], self._script[latent_frames:]
            events += [event for _, event in taken]
            return [
                *(as_entry(frame) for frame, _ in taken),
                *([] for _ in range(latent_frames - len(taken))),
            ]
        held = self._sample_buttons(latent_frames, events)
        if self._analog.is_at_rest:  # always true for models that have only buttons
            return list(map(list, held))
        analog = self._analog.sample(latent_frames, events)
        return [
            as_entry(ActionFrame(buttons, axes, scroll))
            for buttons, (axes, scroll) in zip(held, analog, strict=True)
        ]

    def _sample_buttons(self, latent_frames: int, events: list[AnalogEvent]) -> list[Held]:
        pulse: Held | None = None
        if self._transitions:
            for buttons, event in self._transitions:
                pulse = buttons or pulse
                events.append(event)
            self._held, self._held_by = self._transitions[-1]
            pulse = None if pulse == self._held else pulse
            self._transitions.clear()
        elif self._held_by is not None:
            events.append(self._held_by)
        chunk = [self._held] * latent_frames
        if pulse is not None:
            chunk[0] = pulse
        return chunk


def _moves(update: Update) -> bool:
    return isinstance(update, ControlStates) and any(
        step.axes or step.scroll for step in update.transitions
    )
