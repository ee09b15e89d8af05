# SPDX-License-Identifier: Apache-2.0
"""Parse the actions in clients' messages, for all endpoints.

Actions are sent as frames or as transitions. Frames are a list with one entry per latent frame.
Each entry lists the names of held buttons, or is a map with `buttons`, `axes` and `scroll`.
Transitions are sent as `{"mode": "state", "transitions": [...]}`, where the list contains maps with
the same keys. If a key is absent, its controls do not change. An unknown control is refused with
`invalid_action` and a list of the model's controls. Camera keys come from clients that support no
other controls. Each camera key presses the corresponding button. Camera keys without a button are
ignored, as are all other keys.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from vllm_omni.actions import (
    MAX_HELD,
    ActionEntry,
    ActionFrame,
    ActionSpace,
    Name,
    Value,
    as_frame,
    check_frame,
)
from vllm_omni.camera_keys import CAMERA_KEYS
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.controls.control_track import (
    MAX_SCRIPT_ENTRIES,
    ControlScript,
    ControlStates,
    ControlTransition,
    Held,
)
from vllm_omni.outputs import RequestFailed

_MAX_TRANSITIONS: Final = 512
_MAX_KEYS: Final = 16  # camera keys held at once


class _Transition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    buttons: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_HELD)] | None = None
    """Names of the held buttons. None: the held buttons do not change."""
    axes: dict[Name, Value] = msgspec.field(default_factory=dict)
    """Axis values by axis name."""
    scroll: Value = 0.0
    """Number of notches by which the wheel was turned."""
    client_ts_ms: float | None = None
    """This field is accepted for compatibility and has no effect."""


class _States(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["state"]
    """Mode of the message. The only supported mode is `state`."""
    transitions: Annotated[list[_Transition], msgspec.Meta(max_length=_MAX_TRANSITIONS)]
    """Transitions, oldest first. A message may contain at most 512 transitions."""


def read_actions_message(value: Any, space: ActionSpace) -> ControlScript | ControlStates:
    """Parse the frames or transitions of one message.

    Raises:
        EndpointError: `invalid_action` if the message is malformed or names unknown controls.
    """
    if isinstance(value, dict):
        states: _States = _convert(value, _States, space)
        return ControlStates(
            tuple(_transition(index, item, space) for index, item in enumerate(states.transitions))
        )
    if isinstance(value, list) and len(value) > MAX_SCRIPT_ENTRIES:
        raise EndpointError(
            "invalid_action",
            f"{len(value)} frames arrived; at most {MAX_SCRIPT_ENTRIES}",
            param="actions",
        )
    return read_script(convert_frames(value, space), space)


def convert_frames(value: Any, space: ActionSpace) -> list[ActionEntry]:
    """Parse a list of frames without checking the control names, which `read_script` checks.

    Raises:
        EndpointError: `invalid_action` if a frame is malformed.
    """
    frames: list[ActionEntry] = _convert(value, list[ActionEntry], space)
    return frames


def read_script(entries: Sequence[ActionEntry], space: ActionSpace) -> ControlScript:
    """Check parsed frames against the model's controls.

    Raises:
        EndpointError: `invalid_action` if a frame does not match the controls.
    """
    frames = tuple(_without_repeats(as_frame(entry)) for entry in entries)
    for index, frame in enumerate(frames):
        _check(space, frame, f"actions[{index}]", summed=False)
    return ControlScript(frames)


def camera_frames(entries: Iterable[Any], space: ActionSpace) -> ControlScript:
    """Parse frames of camera keys, which are sent as one list of keys per latent frame.

    Raises:
        EndpointError: `invalid_request` if an entry is not a list of strings.
    """
    return ControlScript(tuple(ActionFrame(camera_buttons(keys, space)) for keys in entries))


def camera_buttons(keys: Any, space: ActionSpace) -> Held:
    """Return the buttons that correspond to held camera keys, or only the first of these buttons if
    at most one may be held. Unknown keys are ignored, as clients expect.

    Raises:
        EndpointError: `invalid_request` if the keys are not a list of strings.
    """
    if not isinstance(keys, list) or len(keys) > _MAX_KEYS or not {str}.issuperset(map(type, keys)):
        raise EndpointError(
            "invalid_request",
            f"keys must be a list of at most {_MAX_KEYS} short texts",
            param="camera_actions",
        )
    names: dict[str, None] = {}
    for key in keys:
        known = len(key) == 1 and key.lower() in CAMERA_KEYS
        if known and (name := space.button_of_key(key.lower())) is not None:
            names[name] = None
    return tuple(names)[:1] if space.exclusive else tuple(names)


def _transition(index: int, item: _Transition, space: ActionSpace) -> ControlTransition:
    frame = _without_repeats(ActionFrame(item.buttons or (), item.axes, item.scroll))
    _check(space, frame, f"transitions[{index}]", summed=True)
    return ControlTransition(
        None if item.buttons is None else frame.buttons, frame.axes, frame.scroll
    )


def _without_repeats(frame: ActionFrame) -> ActionFrame:
    return msgspec.structs.replace(frame, buttons=tuple(dict.fromkeys(frame.buttons)))


def _check(space: ActionSpace, frame: ActionFrame, where: str, *, summed: bool) -> None:
    try:
        check_frame(space, frame, where, summed=summed)
    except RequestFailed as failure:
        raise EndpointError(failure.code, failure.message, param="actions") from None


def _convert(value: Any, kind: Any, space: ActionSpace) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise EndpointError(
            "invalid_action",
            f"actions: {error}; this model takes {space.describe()}",
            param="actions",
        ) from None
