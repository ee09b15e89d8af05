# SPDX-License-Identifier: Apache-2.0
"""The action modality: the controls a model takes (`ActionSpace`), and one request's controls (`ActionFrame`).

A family states its space in `ModelFamily.action_space`; doors, the web page, environments and the model itself read
everything from it: which controls there are, whether a session has a prompt and a start image. A request carries one
entry per latent frame in `DiffusionParams.actions`, or dense arrays as the tensors `buttons`, `axes` and `scroll`
(`multi_modal_data={"actions": {...}}` offline); `read_actions` turns either into `ActionRows`.
Held by tests/test_actions.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec
import torch

from vllm_omni.outputs import RequestFailed

# N frames, B buttons, A axes

MAX_ENTRIES: Final = 64
"""Most entries of one request's `actions`."""
ACTION_TENSORS: Final = ("buttons", "axes", "scroll")
MAX_HELD: Final = 256
"""Most buttons of one frame: all that a keyboard of virtual-key codes has."""
_LARGEST: Final = 1e6

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
Value = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
Use = Literal["none", "optional", "required"]


class Button(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A control that is held or not. title: its effect, in one or two words.

    codes: inputs of the web page, keys as browsers name them (KeyW, ArrowUp) or a mouse's buttons (Mouse0).
    """

    name: Name
    title: str
    codes: tuple[str, ...] = ()


class Axis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A control with a value.

    kind: `rate` = a value per frame that stays until it changes (a stick); `motion` = what has moved since the last
    frame, summed up until a frame uses it (a mouse). low, high: range of one frame's value, in `unit`.
    mouse: the direction of a captured mouse that moves it on the web page, right and down positive; scale: units per
    pixel of that motion.
    """

    name: Name
    title: str
    unit: str
    kind: Literal["rate", "motion"] = "rate"
    low: float = -_LARGEST
    high: float = _LARGEST
    mouse: Literal["x", "y"] | None = None
    scale: float = 1.0


class ActionSpace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The controls a served model takes.

    buttons, axes: in the order of the columns of dense arrays. scroll: whether a wheel counts, as -1, 0 or 1 a frame.
    exclusive: at most one button is held in a frame. pose: whether camera poses steer it instead of buttons.
    prompt, image: whether a session's first request needs a text and a start image; `none` = it takes none at all.
    """

    buttons: tuple[Button, ...] = ()
    axes: tuple[Axis, ...] = ()
    scroll: bool = False
    exclusive: bool = False
    pose: bool = False
    prompt: Use = "required"
    image: Use = "required"

    @property
    def button_names(self) -> tuple[str, ...]:
        return tuple(button.name for button in self.buttons)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def has_controls(self) -> bool:
        """Whether requests may carry `actions`."""
        return bool(self.buttons or self.axes or self.scroll)

    @property
    def is_steered(self) -> bool:
        return self.pose or self.has_controls

    def button_of_key(self, key: str) -> str | None:
        """The button that a camera key (`CAMERA_KEYS`) presses: the one so named, else the page's for that key."""
        code, found = f"Key{key.upper()}", None
        for button in self.buttons:
            if button.name == key:
                return key
            if found is None and code in button.codes:
                found = button.name
        return found

    def describe(self) -> str:
        """The actions it takes, for refusals: one line, at most `_MOST_LISTED` names of each kind."""
        pressed = sorted(self.buttons, key=_habit) if len(self.buttons) > _MOST_LISTED else self.buttons
        parts = [
            f"{kind} {', '.join(names[:_MOST_LISTED])}{_others(len(names) - _MOST_LISTED)}"
            for kind, names in (("buttons", [button.name for button in pressed]), ("axes", self.axis_names))
            if names
        ]
        return "; ".join([*parts, *(["scroll"] if self.scroll else [])]) or "no actions"

    def as_json(self) -> dict[str, Any]:
        """As a greeting carries it to clients, with every field; ranges and scales are floats."""
        numbers = ("low", "high", "scale")
        told = msgspec.to_builtins(self)
        axes = [{**axis, **{name: float(axis[name]) for name in numbers}} for axis in told["axes"]]
        return {**told, "axes": axes}

    def takes(self) -> str:
        """Everything a session is made from, for refusals of a prompt or an image."""
        parts = [what for what, use in (("a prompt", self.prompt), ("a start image", self.image)) if use != "none"]
        return "; ".join([*parts, *(["camera poses"] if self.pose else []), self.describe()])


_MOST_LISTED: Final = 36
"""Names of one kind in a refusal: the letters, space, the mouse's buttons, the arrows, shift and control fit."""
_HABITS: Final = ("Key", "Space", "Mouse", "Arrow", "Shift", "Control", "")


def _habit(button: Button) -> int:
    """How early a button is listed among many: by the key of the page that presses it; last without one."""
    return next((n for n, start in enumerate(_HABITS) if button.codes and button.codes[0].startswith(start)), 99)


def _others(count: int) -> str:
    return f" and {count} more (the server's greeting lists them under `actions`)" if count > 0 else ""


CAMERA_SPACE: Final = ActionSpace(
    buttons=(
        Button("w", "forward", ("KeyW",)),
        Button("a", "left", ("KeyA",)),
        Button("s", "back", ("KeyS",)),
        Button("d", "right", ("KeyD",)),
        Button("i", "look up", ("KeyI", "ArrowUp")),
        Button("j", "look left", ("KeyJ", "ArrowLeft")),
        Button("k", "look down", ("KeyK", "ArrowDown")),
        Button("l", "look right", ("KeyL", "ArrowRight")),
    ),
    pose=True,
)
"""The controls of a camera that flies: the eight keys, or poses."""


class ActionFrame(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Controls during one latent frame. buttons: names of the held ones. axes: name -> value. scroll: sign counts."""

    buttons: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    axes: dict[Name, Value] = msgspec.field(default_factory=dict)
    scroll: Value = 0.0


ActionEntry = list[Name] | ActionFrame
"""A list of names is short for a frame that only holds those buttons."""


@dataclass(frozen=True)
class ActionRows:
    """One chunk's controls, a row per frame. buttons_NB: bool. axes_NA: float32. scroll_N: float32, -1, 0 or 1."""

    buttons_NB: torch.Tensor
    axes_NA: torch.Tensor
    scroll_N: torch.Tensor

    def held(self, space: ActionSpace) -> list[tuple[str, ...]]:
        """Return the names of the buttons held in each frame."""
        names = space.button_names
        return [tuple(name for name, down in zip(names, row, strict=True) if down) for row in self.buttons_NB.tolist()]

    def repeated(self, counts: Sequence[int]) -> "ActionRows":
        """Hold row i for `counts[i]` frames: rows of latent frames become rows of pixel frames."""
        times = torch.tensor(list(counts))
        return ActionRows(*(t.repeat_interleave(times, 0) for t in (self.buttons_NB, self.axes_NA, self.scroll_N)))


def read_actions(
    space: ActionSpace,
    entries: Sequence[ActionEntry] | None,
    tensors: Mapping[str, torch.Tensor],
    num_frames: int,
) -> ActionRows | None:
    """Read `num_frames` rows from `DiffusionParams.actions` or from the tensors; None if the request has neither.

    Missing entries at the end are idle. Raises `RequestFailed("invalid_action", ...)` that lists the model's controls.
    """
    dense = {name: tensors[name] for name in ACTION_TENSORS if name in tensors}
    if dense and entries is not None:
        raise RequestFailed("invalid_action", "send `actions` or the tensors buttons, axes, scroll: one of the two")
    if dense:
        return _from_tensors(space, dense, num_frames)
    return None if entries is None else _from_entries(space, entries, num_frames)


def _from_entries(space: ActionSpace, entries: Sequence[ActionEntry], num_frames: int) -> ActionRows:
    if len(entries) > num_frames:
        raise RequestFailed(
            "invalid_action",
            f"actions must hold at most {num_frames} entries, one per latent frame of this chunk, got {len(entries)}",
        )
    rows, columns = _idle(space, num_frames), _columns(space)
    for index, entry in enumerate(entries):
        frame = as_frame(entry)
        check_frame(space, frame, f"actions[{index}]")
        for name in frame.buttons:
            rows.buttons_NB[index, columns.buttons[name]] = True
        for name, value in frame.axes.items():
            rows.axes_NA[index, columns.axes[name]] = value
        rows.scroll_N[index] = frame.scroll
    rows.scroll_N.sign_()
    return rows


def as_frame(entry: ActionEntry) -> ActionFrame:
    return entry if isinstance(entry, ActionFrame) else ActionFrame(buttons=tuple(entry))


def as_entry(frame: ActionFrame) -> ActionEntry:
    """The shortest form of a frame: a list of names if it only holds buttons."""
    return frame if frame.axes or frame.scroll else list(frame.buttons)


def check_frame(space: ActionSpace, frame: ActionFrame, where: str = "actions", *, summed: bool = False) -> None:
    """Raise `RequestFailed("invalid_action", ...)` that lists the model's controls.

    where: names the frame in the refusal. summed: values of `motion` axes are parts of a sum and may be of any size.
    """
    columns = _columns(space)
    for name in frame.buttons:
        if name not in columns.buttons:
            raise _unknown(f"{where} holds the button {name!r}", space)
    if space.exclusive and len(set(frame.buttons)) > 1:
        raise _unknown(f"{where} holds several buttons, this model takes one at a time", space)
    for name, value in frame.axes.items():
        if name not in columns.axes:
            raise _unknown(f"{where} moves the axis {name!r}", space)
        axis = space.axes[columns.axes[name]]
        if summed and axis.kind == "motion" and math.isfinite(value):
            continue
        if not axis.low <= value <= axis.high:  # NaN as well
            raise _out_of_range(axis, value)
    if frame.scroll and not space.scroll:
        raise _unknown(f"{where} scrolls", space)
    if not math.isfinite(frame.scroll):
        raise RequestFailed("invalid_action", "scroll must be finite")


def _from_tensors(space: ActionSpace, dense: Mapping[str, torch.Tensor], num_frames: int) -> ActionRows:
    rows = _idle(space, num_frames)
    into = {"buttons": rows.buttons_NB, "axes": rows.axes_NA, "scroll": rows.scroll_N}
    for name, given in dense.items():
        row = into[name]
        if name == "scroll" and not space.scroll:
            raise _unknown("the tensor scroll arrived", space)
        if given.shape != row.shape or given.layout != torch.strided or given.dtype.is_complex:
            raise RequestFailed(
                "invalid_action",
                f"{name} must be numbers of shape {list(row.shape)}, a row per frame of the chunk and a column per "
                f"control; this model takes {space.describe()}; got {given.dtype} {list(given.shape)}",
            )
        values = given.to("cpu", torch.float32)
        if name == "buttons" and not bool(((values == 0) | (values == 1)).all()):
            raise RequestFailed("invalid_action", "buttons must hold zeros and ones only")
        row.copy_(values)
    return _checked(space, rows)


@dataclass(frozen=True)
class _Columns:
    buttons: dict[str, int]
    axes: dict[str, int]


@lru_cache(maxsize=16)
def _columns(space: ActionSpace) -> _Columns:
    """Places of the names in dense arrays."""
    buttons, axes = ({name: n for n, name in enumerate(names)} for names in (space.button_names, space.axis_names))
    return _Columns(buttons, axes)


def _idle(space: ActionSpace, num_frames: int) -> ActionRows:
    return ActionRows(
        torch.zeros(num_frames, len(space.buttons), dtype=torch.bool),
        torch.zeros(num_frames, len(space.axes)),
        torch.zeros(num_frames),
    )


def _checked(space: ActionSpace, rows: ActionRows) -> ActionRows:
    if space.exclusive and bool((rows.buttons_NB.sum(1) > 1).any()):
        raise _unknown("several buttons are held in one frame, this model takes one at a time", space)
    for axis, values in zip(space.axes, rows.axes_NA.unbind(1), strict=True):
        bad = ~((values >= axis.low) & (values <= axis.high))  # NaN as well
        if bool(bad.any()):
            raise _out_of_range(axis, float(values[bad][0]))
    if not bool(torch.isfinite(rows.scroll_N).all()):
        raise RequestFailed("invalid_action", "scroll must be finite")
    rows.scroll_N.sign_()
    return rows


def _out_of_range(axis: Axis, value: float) -> RequestFailed:
    return RequestFailed(
        "invalid_action",
        f"the axis {axis.name} must lie in [{axis.low:g}, {axis.high:g}] {axis.unit}, got {value:g}",
    )


def _unknown(found: str, space: ActionSpace) -> RequestFailed:
    return RequestFailed("invalid_action", f"{found}; this model takes {space.describe()}")
