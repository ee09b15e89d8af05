# SPDX-License-Identifier: Apache-2.0
"""`StartPose`: where in a world a session's start image was taken, as clients send it.

A model reads it from `DiffusionParams.options` of a session's first chunk (`START_POSE`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

START_POSE: Final = "start_pose"

Degrees = Annotated[float, msgspec.Meta(ge=-360, le=360)]
Metres = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]


class StartPose(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """x_m, z_m: metres to the east and north. heading_degrees: from north to the east. pitch_degrees: upwards."""

    x_m: Metres
    z_m: Metres
    heading_degrees: Degrees
    pitch_degrees: Annotated[float, msgspec.Meta(ge=-85, le=85)] = 0.0

    def as_option(self) -> dict[str, dict[str, float]]:
        """The entry of `DiffusionParams.options`."""
        return {START_POSE: msgspec.to_builtins(self)}


def without_start_pose(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request's later chunks: only its first one may start a session."""
    return {name: value for name, value in options.items() if name != START_POSE}
