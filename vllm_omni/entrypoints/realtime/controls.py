# SPDX-License-Identifier: Apache-2.0
"""`ControlTrack`: a client's pending controls, and the controls of the next chunk.

Held keys come in two ways. A script is a timeline, one list of keys per latent frame, consumed in order and then idle.
States are transitions ("now these keys are held"); the newest is held until it changes, so there is never a backlog,
and a key pressed and released between two chunks still acts for one latent frame. A script replaces states and states
replace a script. A prompt is a slot of one: the latest wins. Everything here has a fixed bound.

Pure data: no sockets, no clock, no engine. Held by tests/entrypoints/realtime/test_controls.py.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

KEYS: Final = frozenset("wasdijkl")
"""`w s a d` move forward, back, left, right; `i k` look up and down, `j l` left and right."""
MAX_SCRIPT_ENTRIES: Final = 512
_REMEMBERED_IDS: Final = 1024

Held = tuple[str, ...]
"""Keys held during one latent frame; () = none."""


@dataclass(frozen=True)
class Script:
    entries: tuple[Held, ...]


@dataclass(frozen=True)
class States:
    """Transitions in the order they happened."""

    transitions: tuple[Held, ...]


@dataclass(frozen=True)
class Prompt:
    text: str


Update = Script | States | Prompt


@dataclass(frozen=True)
class Sample:
    """Controls of one chunk.

    actions: one entry per latent frame, None if no key was ever spoken of. prompt: a new one, or None. event_id: of the
    newest event at work in this chunk. is_new: whether no earlier sample named that event. applied: ids of the
    events that act in this chunk for the first time.
    """

    actions: list[list[str]] | None = None
    prompt: str | None = None
    event_id: int | None = None
    is_new: bool = False
    applied: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Event:
    """order: counts all events of the session."""

    order: int
    event_id: int | None


@dataclass
class ControlTrack:
    """Controls of one session, in the order they arrive; `apply` and `sample` from one event loop."""

    _script: deque[tuple[Held, _Event]] = field(default_factory=deque)
    _transitions: list[tuple[Held, _Event]] = field(default_factory=list)
    _held: Held = ()
    _held_by: _Event | None = None
    _any_keys: bool = False
    _prompt: tuple[str, _Event] | None = None
    _num_events: int = 0
    _newest_told: int = -1
    _acting: set[int] = field(default_factory=set)
    _seen: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def is_repeated(self, event_id: int | None) -> bool:
        """Whether an event of this id has been applied; a repetition has no second effect."""
        return event_id is not None and event_id in self._seen

    def apply(self, updates: Iterable[Update], event_id: int | None = None) -> list[int]:
        """Take one event, whose parts belong together. Returns ids of events that now never act."""
        event = _Event(self._num_events, event_id)
        self._num_events += 1
        if event_id is not None:
            self._seen[event_id] = None
            while len(self._seen) > _REMEMBERED_IDS:
                self._seen.popitem(last=False)
        replaced: list[_Event] = []
        for update in updates:
            match update:
                case Prompt(text):
                    replaced += [self._prompt[1]] if self._prompt is not None else []
                    self._prompt = (text, event)
                case Script(entries):
                    replaced += self._clear_keys()
                    self._script.extend((keys, event) for keys in entries[:MAX_SCRIPT_ENTRIES])
                    self._any_keys = True
                case States(transitions):
                    replaced += [waiting for _, waiting in self._script]
                    self._script.clear()
                    replaced += self._push(transitions, event)
                    self._any_keys = True
        alive = self._acting | self._waiting() if replaced else set()
        gone = [old for old in replaced if old.order not in alive and old.order != event.order]
        ids = {old.event_id: None for old in gone}
        return [old_id for old_id in ids if old_id is not None]

    def _waiting(self) -> set[int]:
        """Orders of the events of which some part is still to act."""
        events = [event for _, event in (*self._script, *self._transitions)]
        return {event.order for event in [*events, *([self._prompt[1]] if self._prompt is not None else [])]}

    def _push(self, transitions: tuple[Held, ...], event: _Event) -> list[_Event]:
        """Only the newest transition and the newest one with a key in it can ever matter."""
        replaced = [old for _, old in self._transitions]
        for keys in transitions:
            self._transitions.append((keys, event))
        if len(self._transitions) > 2:
            last = self._transitions[-1]
            pulse = next((item for item in reversed(self._transitions) if item[0]), last)
            self._transitions = [pulse, last] if pulse is not last else [last]
        kept = {item.order for _, item in self._transitions}
        return [old for old in replaced if old.order not in kept]

    def _clear_keys(self) -> list[_Event]:
        replaced = [event for _, event in self._script] + [event for _, event in self._transitions]
        self._script.clear()
        self._transitions.clear()
        self._held, self._held_by = (), None
        return replaced

    def sample(self, latent_frames: int, with_prompt: bool = True) -> Sample:
        """Return and consume the next chunk's controls. with_prompt: whether the prompt may switch."""
        events: list[_Event] = []
        actions = self._sample_keys(latent_frames, events) if self._any_keys else None
        prompt = None
        if with_prompt and self._prompt is not None:
            prompt, event = self._prompt
            self._prompt = None
            events.append(event)
        newest: _Event | None = None
        applied: dict[int, int] = {}
        for event in events:
            if event.event_id is None:
                continue
            if newest is None or event.order > newest.order:
                newest = event
            if event.order not in self._acting:
                applied[event.order] = event.event_id
        is_new = newest is not None and newest.order > self._newest_told
        if is_new and newest is not None:
            self._newest_told = newest.order
        self._acting = {event.order for event in events}
        return Sample(
            actions=actions,
            prompt=prompt,
            event_id=newest.event_id if newest is not None else None,
            is_new=is_new,
            applied=tuple(event_id for _, event_id in sorted(applied.items())),
        )

    def _sample_keys(self, latent_frames: int, events: list[_Event]) -> list[list[str]]:
        if self._script or (not self._transitions and self._held_by is None):
            taken = [self._script.popleft() for _ in range(min(latent_frames, len(self._script)))]
            events += [event for _, event in taken]
            return [list(keys) for keys, _ in taken] + [[] for _ in range(latent_frames - len(taken))]
        pulse: Held | None = None
        if self._transitions:
            final, event = self._transitions[-1]
            pressed = next((keys for keys, _ in reversed(self._transitions) if keys), None)
            pulse = pressed if pressed is not None and pressed != final else None
            events += [item for _, item in self._transitions]
            self._held, self._held_by = final, event
            self._transitions.clear()
        elif self._held_by is not None:
            events.append(self._held_by)
        chunk = [list(self._held) for _ in range(latent_frames)]
        if pulse is not None:
            chunk[0] = list(pulse)
        return chunk
