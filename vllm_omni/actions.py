# SPDX-License-Identifier: Apache-2.0
"""The action modality: a model's controls (`ActionSpace`) and their values in one latent frame
(`ActionFrame`).

A model family declares its controls in `ModelFamily.action_space`. Endpoints, the web page,
environments and the model all use this declaration. It states, for example, which buttons exist and
whether a session has a prompt and a start image. A request contains one entry per latent frame in
`DiffusionParams.actions`, or dense arrays in the `buttons`, `axes` and `scroll` tensors (offline:
`multi_modal_data={"actions": {...}}`). `read_actions` converts either form to `ActionFrames`.
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
"""Maximum number of entries in a request's `actions`."""
ACTION_TENSORS: Final = ("buttons", "axes", "scroll")
MAX_IMAGES: Final = 16
"""Maximum number of named images per session."""
_IMAGES: Final = "images."
MAX_HELD: Final = 256
"""Maximum number of buttons held in one frame: the number of virtual-key codes on a keyboard."""
_LARGEST: Final = 1e6

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
Value = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
Use = Literal["none", "optional", "required"]
NamedSources = Annotated[dict[Name, Any], msgspec.Meta(max_length=MAX_IMAGES)]
"""Named images in a client's message, given as files or `data:` URLs."""


class Button(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A control that is either held or released."""

    name: Name
    """Name of the button in requests."""
    title: str
    """Effect of the button in one or two words, shown to the user."""
    codes: tuple[str, ...] = ()
    """Browser inputs that press the button on the web page: key codes (KeyW, ArrowUp) or mouse
    buttons (Mouse0).
    """


class Axis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A control with a continuous value."""

    name: Name
    """Name of the axis in requests."""
    title: str
    """Effect of the axis in one or two words, shown to the user."""
    unit: str
    """Unit of the axis's values."""
    kind: Literal["rate", "motion"] = "rate"
    """How the axis value applies to frames. The value of a `rate` axis applies to every frame until
    it changes, like the position of a joystick. A `motion` axis accumulates movement until a frame
    consumes it, like a mouse.
    """
    low: float = -_LARGEST
    """Smallest value, in `unit`, that the axis can have in one frame."""
    high: float = _LARGEST
    """Largest value, in `unit`, that the axis can have in one frame."""
    mouse: Literal["x", "y"] | None = None
    """Mouse direction that moves the axis while the web page captures the mouse. Motion to the
    right or downwards is positive.
    """
    scale: float = 1.0
    """Change of the axis per pixel of mouse motion, in `unit`."""


class NamedImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image that a session accepts in addition to its start image."""

    name: Name
    """Name of the image in requests: letters, digits and underscores."""
    title: str
    """What the image shows, as displayed to the user."""
    use: Literal["optional", "required"] = "optional"
    """Whether the first request of a session must include the image."""


def image_tensor(name: str) -> str:
    """Return the name of the tensor that holds the named image `name` in engine requests."""
    return f"{_IMAGES}{name}"


class ActionSpace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The controls and inputs of a served model."""

    buttons: tuple[Button, ...] = ()
    """Buttons, in the column order of dense arrays."""
    axes: tuple[Axis, ...] = ()
    """Axes, in the column order of dense arrays."""
    scroll: bool = False
    """Whether the model uses the scroll wheel. The scroll value in a frame is -1, 0 or 1."""
    exclusive: bool = False
    """Whether at most one button may be held in each frame."""
    pose: bool = False
    """Whether requests may control the camera with poses instead of buttons."""
    prompt: Use = "required"
    """Whether the first request of a session needs a prompt; `none` means the model does not take
    prompts.
    """
    image: Use = "required"
    """Whether the first request of a session needs a start image; `none` means the model does not
    take start images.
    """
    images: tuple[NamedImage, ...] = ()
    """Additional images that a session's first request may include, by name."""

    @property
    def image_names(self) -> tuple[str, ...]:
        return tuple(image.name for image in self.images)

    @property
    def button_names(self) -> tuple[str, ...]:
        return tuple(button.name for button in self.buttons)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def has_controls(self) -> bool:
        """Whether requests may contain `actions`."""
        return bool(self.buttons or self.axes or self.scroll)

    @property
    def is_steered(self) -> bool:
        return self.pose or self.has_controls

    def button_of_key(self, key: str) -> str | None:
        """Return the button for a camera key (`CAMERA_KEYS`).

        A button whose name is the key takes precedence over a button to which the web page maps the
        key. The result is None if neither button exists.
        """
        code, found = f"Key{key.upper()}", None
        for button in self.buttons:
            if button.name == key:
                return key
            if found is None and code in button.codes:
                found = button.name
        return found

    def describe(self) -> str:
        """Describe the actions in one line, for error messages.

        The description lists at most `_MOST_LISTED` buttons and at most `_MOST_LISTED` axes.
        """
        pressed = (
            sorted(self.buttons, key=_habit) if len(self.buttons) > _MOST_LISTED else self.buttons
        )
        parts = [
            f"{kind} {', '.join(names[:_MOST_LISTED])}{_others(len(names) - _MOST_LISTED)}"
            for kind, names in (
                ("buttons", [button.name for button in pressed]),
                ("axes", self.axis_names),
            )
            if names
        ]
        return "; ".join([*parts, *(["scroll"] if self.scroll else [])]) or "no actions"

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON types, for clients. `low`, `high` and `scale` are floats."""
        numbers = ("low", "high", "scale")
        reported = msgspec.to_builtins(self)
        axes = [
            {**axis, **{name: float(axis[name]) for name in numbers}} for axis in reported["axes"]
        ]
        return {**reported, "axes": axes}

    def takes(self) -> str:
        """Describe all of a session's inputs, for error messages about a prompt or an image."""
        parts = [
            what
            for what, use in (("a prompt", self.prompt), ("a start image", self.image))
            if use != "none"
        ]
        if self.images:
            parts.append(f"images {', '.join(self.image_names)}")
        return "; ".join([*parts, *(["camera poses"] if self.pose else []), self.describe()])


_MOST_LISTED: Final = 36
"""Maximum number of button names, and of axis names, in an error message.

The limit is large enough for the letters, space, mouse buttons, arrow keys, shift and control.
"""
_HABITS: Final = ("Key", "Space", "Mouse", "Arrow", "Shift", "Control", "")


def _habit(button: Button) -> int:
    """Return a button's sort key for long lists.

    Buttons are sorted by the kind of key that triggers them on the web page. Buttons without a key
    come last.
    """
    return next(
        (
            n
            for n, start in enumerate(_HABITS)
            if button.codes and button.codes[0].startswith(start)
        ),
        99,
    )


def _others(count: int) -> str:
    return (
        f" and {count} more (the server's greeting lists them under `actions`)" if count > 0 else ""
    )


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
"""Controls for a free camera: eight keys, or camera poses."""


class ActionFrame(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Controls for one latent frame."""

    buttons: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    """Names of the held buttons."""
    axes: dict[Name, Value] = msgspec.field(default_factory=dict)
    """Values by axis name. A missing axis has the value 0."""
    scroll: Value = 0.0
    """Mouse wheel motion; only its sign is used."""


ActionEntry = list[Name] | ActionFrame
"""Controls for one frame. A list of names stands for a frame in which exactly the named buttons are
held and no other controls are used.
"""


@dataclass(frozen=True)
class ActionFrames:
    """Controls for one chunk as dense tensors, with one row per frame."""

    buttons_NB: torch.Tensor
    """Whether each button is held in each frame. Dtype: bool."""
    axes_NA: torch.Tensor
    """Value of each axis in each frame. Dtype: float32."""
    scroll_N: torch.Tensor
    """Scroll direction in each frame: -1, 0 or 1. Dtype: float32."""

    def held(self, space: ActionSpace) -> list[tuple[str, ...]]:
        """Return the names of the buttons held in each frame."""
        names = _columns(space).buttons
        return [
            tuple(name for name, down in zip(names, row, strict=True) if down)
            for row in self.buttons_NB.tolist()
        ]

    def repeated(self, counts: Sequence[int]) -> "ActionFrames":
        """Repeat row i `counts[i]` times, for example to expand latent frames to pixel frames."""
        times = torch.tensor(list(counts))
        return ActionFrames(
            *(t.repeat_interleave(times, 0) for t in (self.buttons_NB, self.axes_NA, self.scroll_N))
        )


def read_actions(
    space: ActionSpace,
    entries: Sequence[ActionEntry] | None,
    tensors: Mapping[str, torch.Tensor],
    num_frames: int,
) -> ActionFrames | None:
    """Read a chunk's controls.

    Args:
        space: The model's controls.
        entries: `DiffusionParams.actions`. If there are fewer entries than frames, the remaining
            frames are idle.
        tensors: The request's tensors. The tensors named in `ACTION_TENSORS` are the dense form of
            the controls.
        num_frames: Number of latent frames in the chunk.

    Returns:
        Controls for `num_frames` frames, or None if the request contains no controls.

    Raises:
        RequestFailed: `invalid_action`; the message lists the model's controls.
    """
    dense = {name: tensors[name] for name in ACTION_TENSORS if name in tensors}
    if dense and entries is not None:
        raise RequestFailed(
            "invalid_action", "send `actions` or the tensors buttons, axes, scroll: one of the two"
        )
    if dense:
        return _from_tensors(space, dense, num_frames)
    return None if entries is None else _from_entries(space, entries, num_frames)


def _from_entries(
    space: ActionSpace, entries: Sequence[ActionEntry], num_frames: int
) -> ActionFrames:
    if len(entries) > num_frames:
        raise RequestFailed(
            "invalid_action",
            f"actions must hold at most {num_frames} entries, one per latent frame of this chunk, "
            f"got {len(entries)}",
        )
    frames, columns = _idle(space, num_frames), _columns(space)
    for index, entry in enumerate(entries):
        frame = as_frame(entry)
        check_frame(space, frame, f"actions[{index}]")
        for name in frame.buttons:
            frames.buttons_NB[index, columns.buttons[name]] = True
        for name, value in frame.axes.items():
            frames.axes_NA[index, columns.axes[name]] = value
        frames.scroll_N[index] = frame.scroll
    frames.scroll_N.sign_()
    return frames


def as_frame(entry: ActionEntry) -> ActionFrame:
    return entry if isinstance(entry, ActionFrame) else ActionFrame(buttons=tuple(entry))


def as_entry(frame: ActionFrame) -> ActionEntry:
    """Return the shortest form of a frame: a list of names if the frame uses only buttons."""
    return frame if frame.axes or frame.scroll else list(frame.buttons)


def check_frame(
    space: ActionSpace, frame: ActionFrame, where: str = "actions", *, summed: bool = False
) -> None:
    """Check a frame's controls.

    Args:
        space: The model's controls.
        frame: Controls to check.
        where: How error messages refer to the frame.
        summed: Whether `motion` axis values are accumulated movement, which may exceed the axis
            range.

    Raises:
        RequestFailed: `invalid_action`; the message lists the model's controls.
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
        if not axis.low <= value <= axis.high:  # also rejects NaN
            raise _out_of_range(axis, value)
    if frame.scroll and not space.scroll:
        raise _unknown(f"{where} scrolls", space)
    if not math.isfinite(frame.scroll):
        raise RequestFailed("invalid_action", "scroll must be finite")


def _from_tensors(
    space: ActionSpace, dense: Mapping[str, torch.Tensor], num_frames: int
) -> ActionFrames:
    frames = _idle(space, num_frames)
    into = {"buttons": frames.buttons_NB, "axes": frames.axes_NA, "scroll": frames.scroll_N}
    for name, given in dense.items():
        row = into[name]
        if name == "scroll" and not space.scroll:
            raise _unknown("the tensor scroll arrived", space)
        if given.shape != row.shape or given.layout != torch.strided or given.dtype.is_complex:
            raise RequestFailed(
                "invalid_action",
                f"{name} must be numbers of shape {list(row.shape)}, one row per frame of the "
                f"chunk and one column per control; this model takes {space.describe()}; got "
                f"{given.dtype} {list(given.shape)}",
            )
        values = given.to("cpu", torch.float32)
        if name == "buttons" and not bool(((values == 0) | (values == 1)).all()):
            raise RequestFailed("invalid_action", "buttons must be zeros and ones")
        row.copy_(values)
    return _checked(space, frames)


@dataclass(frozen=True)
class _Columns:
    buttons: dict[str, int]
    """Column of each button in dense arrays."""
    axes: dict[str, int]
    """Column of each axis in dense arrays."""


@lru_cache(maxsize=16)
def _columns(space: ActionSpace) -> _Columns:
    """Return the column of each button and axis in dense arrays."""
    buttons, axes = (
        {name: n for n, name in enumerate(names)}
        for names in (space.button_names, space.axis_names)
    )
    return _Columns(buttons, axes)


def _idle(space: ActionSpace, num_frames: int) -> ActionFrames:
    return ActionFrames(
        torch.zeros(num_frames, len(space.buttons), dtype=torch.bool),
        torch.zeros(num_frames, len(space.axes)),
        torch.zeros(num_frames),
    )


def _checked(space: ActionSpace, frames: ActionFrames) -> ActionFrames:
    if space.exclusive and bool((frames.buttons_NB.sum(1) > 1).any()):
        raise _unknown(
            "several buttons are held in one frame, this model takes one at a time", space
        )
    for axis, values in zip(space.axes, frames.axes_NA.unbind(1), strict=True):
        bad = ~((values >= axis.low) & (values <= axis.high))  # also finds NaN
        if bool(bad.any()):
            raise _out_of_range(axis, float(values[bad][0]))
    if not bool(torch.isfinite(frames.scroll_N).all()):
        raise RequestFailed("invalid_action", "scroll must be finite")
    frames.scroll_N.sign_()
    return frames


def _out_of_range(axis: Axis, value: float) -> RequestFailed:
    return RequestFailed(
        "invalid_action",
        f"the axis {axis.name} must lie in [{axis.low:g}, {axis.high:g}] {axis.unit}, got "
        f"{value:g}",
    )


def _unknown(found: str, space: ActionSpace) -> RequestFailed:
    return RequestFailed("invalid_action", f"{found}; this model takes {space.describe()}")
