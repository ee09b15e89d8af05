# SPDX-License-Identifier: Apache-2.0
"""`StartPose`: the world pose of a session's start image, as sent by clients.

A model reads the start pose from `DiffusionParams.options` of a session's first chunk
(`START_POSE`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

START_POSE: Final = "start_pose"

Degrees = Annotated[float, msgspec.Meta(ge=-360, le=360)]
Metres = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]


class StartPose(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """World pose of a start image."""

    x_m: Metres
    """East coordinate of the camera, in metres."""
    z_m: Metres
    """North coordinate of the camera, in metres."""
    heading_degrees: Degrees
    """View direction in degrees, clockwise from north."""
    pitch_degrees: Annotated[float, msgspec.Meta(ge=-85, le=85)] = 0.0
    """View angle above the horizon, in degrees."""

    def as_option(self) -> dict[str, dict[str, float]]:
        """Return the pose as an entry of `DiffusionParams.options`."""
        return {START_POSE: msgspec.to_builtins(self)}


def without_start_pose(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without a start pose, for later chunks of a session. Only the first chunk
    may have a start pose.
    """
    return {name: value for name, value in options.items() if name != START_POSE}
