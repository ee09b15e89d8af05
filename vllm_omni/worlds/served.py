# SPDX-License-Identifier: Apache-2.0
"""`ServedWorld`: the properties of a world that a model needs to track world poses."""

from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_omni.worlds.description import description_file, read_description
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.movement import world_pose
from vllm_omni.worlds.recognition import StartImages


@dataclass(frozen=True, eq=False)
class ServedWorld:
    """The properties of a world that a model needs to track world poses."""

    metres_per_unit: float
    """Length in metres of one unit of camera translation."""
    focal: float | None
    """Focal length of the camera divided by the image width, or None for the model's focal length.
    """
    grid: OccupancyGrid | None
    """Grid of blocked cells, or None if cameras can go anywhere."""
    pitch_limit_degrees: float
    """Largest view angle above or below the horizon, in degrees."""
    starts: StartImages
    """Start images of the world, whose poses are known."""

    @classmethod
    def load(cls, folder: Path) -> "ServedWorld | None":
        """Read the world of a checkpoint directory. The result is None if the directory has no
        world description.

        Raises:
            ValueError: A file is invalid. The message is one line.
        """
        description = read_description(folder)
        if description is None:
            return None
        grid = None
        if description.grid is not None:
            grid = OccupancyGrid.read_image(
                description_file(folder, description.grid.file), description.grid.side_m
            )
        return cls(
            description.metres_per_unit,
            description.focal,
            grid,
            description.pitch_limit_degrees,
            StartImages.load(folder, description),
        )

    def recognised_pose(self, image_HW3: torch.Tensor) -> torch.Tensor | None:
        """Return the world pose [4, 4] of the start image that matches an image, or None if no
        start image matches.

        Args:
            image_HW3: uint8 image of any size.
        """
        start = self.starts.recognise(image_HW3)
        if start is None:
            return None
        return world_pose(start.x_m, start.z_m, start.heading_degrees, start.pitch_degrees)
