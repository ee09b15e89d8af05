# SPDX-License-Identifier: Apache-2.0
"""The action modality: the controls a model takes (`ActionSpace`), and one request's controls (`ActionFrame`).

A family states its space in `ModelFamily.action_space`; doors, the web page, environments and the model itself read
everything from it. A request carries one entry per latent frame in `DiffusionParams.actions`, or dense arrays as the
tensors `buttons`, `axes` and `scroll` (`multi_modal_data={"actions": {...}}` offline); `read_actions` turns either into
`ActionRows`. Held by tests/test_actions.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
import torch

from vllm_omni.outputs import RequestFailed

# N frames, B buttons, A axes

MAX_ENTRIES: Final = 64
"""Most entries of one request's `actions`."""
ACTION_TENSORS: Final = ("buttons", "axes", "scroll")
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

    def describe(self) -> str:
        """The actions it takes, for refusals: one line, at most 24 names of each kind."""
        parts = [
            f"{kind} {', '.join(names[:24])}{', ...' if len(names) > 24 else ''}"
            for kind, names in (("buttons", self.button_names), ("axes", self.axis_names))
            if names
        ]
        return "; ".join([*parts, *(["scroll"] if self.scroll else [])]) or "no actions"


class ActionFrame(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Controls during one latent frame. buttons: names of the held ones. axes: name -> value. scroll: sign counts."""

    buttons: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()
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

    Missing entries at the end are idle. Raises `RequestFailed("invalid_action", ...)` that lists what the model takes.
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
    rows = _idle(space, num_frames)
    buttons, axes = (
        {name: index for index, name in enumerate(names)} for names in (space.button_names, space.axis_names)
    )
    for index, entry in enumerate(entries):
        frame = entry if isinstance(entry, ActionFrame) else ActionFrame(buttons=tuple(entry))
        for name in frame.buttons:
            if name not in buttons:
                raise _unknown(f"actions[{index}] holds the button {name!r}", space)
            rows.buttons_NB[index, buttons[name]] = True
        for name, value in frame.axes.items():
            if name not in axes:
                raise _unknown(f"actions[{index}] moves the axis {name!r}", space)
            rows.axes_NA[index, axes[name]] = value
        if frame.scroll and not space.scroll:
            raise _unknown(f"actions[{index}] scrolls", space)
        rows.scroll_N[index] = frame.scroll
    return _checked(space, rows)


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
                f"{name} must be numbers of shape {list(row.shape)}, a row per frame of the chunk and a column each of "
                f"{space.describe()}; got {given.dtype} {list(given.shape)}",
            )
        values = given.to("cpu", torch.float32)
        if name == "buttons" and not bool(((values == 0) | (values == 1)).all()):
            raise RequestFailed("invalid_action", "buttons must hold zeros and ones only")
        row.copy_(values)
    return _checked(space, rows)


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
            raise RequestFailed(
                "invalid_action",
                f"the axis {axis.name} must lie in [{axis.low:g}, {axis.high:g}] {axis.unit}, got "
                f"{float(values[bad][0]):g}",
            )
    if not bool(torch.isfinite(rows.scroll_N).all()):
        raise RequestFailed("invalid_action", "scroll must be finite")
    rows.scroll_N.sign_()
    return rows


def _unknown(found: str, space: ActionSpace) -> RequestFailed:
    return RequestFailed("invalid_action", f"{found}; this model takes {space.describe()}")
