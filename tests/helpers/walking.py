# SPDX-License-Identifier: Apache-2.0
"""A camera that walks through a world without a model.

The camera follows LingBot World's controls and computes the resulting world poses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from vllm_omni.actions import ActionEntry
from vllm_omni.model_executor.models.lingbot_world.camera import (
    ACTION_SPACE,
    motions_of,
    read_controls,
)
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.movement import heading_of, move_cameras, pitch_of, world_pose
from vllm_omni.worlds.start_pose import StartPose

STEP_M: Final = 0.5
SPACE: Final = ACTION_SPACE
"""A walking camera's action space. The effects of keys, rates and mouse movements add up."""


@dataclass
class Walker:
    """A camera that moves through a world.

    Args:
        start: Pose for the start image.
        grid: Obstacles that stop the camera. Default: none.
    """

    start: StartPose
    grid: OccupancyGrid | None = None
    pose_44: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        start = self.start
        self.pose_44 = world_pose(start.x_m, start.z_m, start.heading_degrees, start.pitch_degrees)

    def walk(self, entries: Sequence[ActionEntry], *, starts: bool) -> list[list[float]]:
        """Move the camera according to one chunk's actions.

        Args:
            entries: Actions, one per latent frame.
            starts: Whether the first latent frame is the start image. The camera does not move in
                that frame.

        Returns:
            The chunk's `world_poses`: x and z in metres, heading and pitch in degrees.
        """
        rows = []
        for number, entry in enumerate(entries):
            if not (starts and number == 0):
                pitch_1 = torch.tensor([pitch_of(self.pose_44)], dtype=torch.float64)
                [motion] = motions_of(read_controls([entry], 1))
                moved = move_cameras(self.pose_44[None], pitch_1, motion, STEP_M, self.grid)
                self.pose_44 = moved[0][0]
            x_m, z_m = float(self.pose_44[0, 3]), float(self.pose_44[2, 3])
            rows.append([x_m, z_m, heading_of(self.pose_44), pitch_of(self.pose_44)])
        return rows

    def copy(self) -> "Walker":
        other = Walker(self.start, self.grid)
        other.pose_44 = self.pose_44
        return other
