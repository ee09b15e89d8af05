# SPDX-License-Identifier: Apache-2.0
"""Converts a model's `ActionSpace` to a gymnasium space, and actions of that space to
`ActionFrame`s.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from vllm_omni.actions import ActionFrame, ActionSpace

Action = Mapping[str, np.ndarray] | np.integer


def gymnasium_space(space: ActionSpace) -> spaces.Dict | spaces.Discrete:
    """Return the gymnasium space of one environment's action, which applies to an entire chunk.

    `buttons` is a `MultiBinary` over `ActionSpace.button_names`. If at most one button may be held,
    `buttons` is a `Discrete` in which 0 means that no button is held. `axes` is a `Box` over
    `ActionSpace.axis_names`, in the axes' units. `scroll` is a `Discrete` over -1, 0 and 1.
    Controls that the model does not have are omitted. For a model without controls, the space is
    `Discrete(1)`.
    """
    kinds: dict[str, spaces.Space[Any]] = {}
    if space.buttons and space.exclusive:
        kinds["buttons"] = spaces.Discrete(1 + len(space.buttons))
    elif space.buttons:
        kinds["buttons"] = spaces.MultiBinary(len(space.buttons))
    if space.axes:
        low, high = ([getattr(axis, side) for axis in space.axes] for side in ("low", "high"))
        kinds["axes"] = spaces.Box(
            np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32
        )
    if space.scroll:
        kinds["scroll"] = spaces.Discrete(3, start=-1)
    return spaces.Dict(kinds) if kinds else spaces.Discrete(1)


def with_rest(taken: spaces.Space[Any], action: Any) -> Any:
    """Add neutral values for controls that are missing from an action or a batch of actions."""
    if not isinstance(taken, spaces.Dict) or not isinstance(action, Mapping):
        return action
    return {
        **{name: np.zeros(kind.shape or (), kind.dtype) for name, kind in taken.items()},
        **action,
    }


def action_frame(space: ActionSpace, action: Action) -> ActionFrame:
    """Convert one environment's action, a member of `gymnasium_space(space)`, to an `ActionFrame`.

    The action may omit controls; an omitted control is neutral.

    Raises:
        ValueError: The action is invalid; the message lists the model's controls.
    """
    taken = gymnasium_space(space)
    if not isinstance(taken, spaces.Dict):
        return ActionFrame()
    if not isinstance(action, Mapping) or not action.keys() <= taken.keys():
        found = sorted(action) if isinstance(action, Mapping) else type(action).__name__
        raise ValueError(
            f"an action may contain {sorted(taken.keys())}, got {found}; the model takes "
            f"{space.describe()}"
        )
    names: tuple[str, ...] = ()
    if "buttons" in action:
        held = np.asarray(action["buttons"])
        if space.exclusive:
            names = space.button_names[int(held) - 1 :][:1] if int(held) else ()
        else:
            names = tuple(name for name, down in zip(space.button_names, held, strict=True) if down)
    values = np.asarray(action["axes"]).tolist() if "axes" in action else [0.0] * len(space.axes)
    axes = zip(space.axis_names, values, strict=True)
    return ActionFrame(buttons=names, axes=dict(axes), scroll=float(action.get("scroll", 0)))
