# SPDX-License-Identifier: Apache-2.0
"""`ServedWorld`: what a model needs of a checkpoint's world to know where its sessions are.

Held by tests/model_executor/models/lingbot_world/test_world_pose.py.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_omni.worlds.card import card_file, read_card
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.movement import world_pose
from vllm_omni.worlds.recognition import StartImages


@dataclass(frozen=True, eq=False)
class ServedWorld:
    """metres_per_unit: length of a unit of camera translation. focal: focal length over the image's width; None = the
    model's own. grid: what stops a walker; None = nothing does.
    """

    metres_per_unit: float
    focal: float | None
    grid: OccupancyGrid | None
    starts: StartImages

    @classmethod
    def load(cls, folder: Path) -> "ServedWorld | None":
        """Read a checkpoint directory; None if it describes no world. Raises ValueError in one line."""
        card = read_card(folder)
        if card is None:
            return None
        grid = None
        if card.grid is not None:
            grid = OccupancyGrid.read(card_file(folder, card.grid.file), card.grid.side_m)
        return cls(card.metres_per_unit, card.focal, grid, StartImages.load(folder, card))

    def recognised_pose(self, image_HW3: torch.Tensor) -> torch.Tensor | None:
        """Return the world pose [4, 4] of a start image, uint8 of any size; None = it is none of the world's."""
        start = self.starts.recognise(image_HW3)
        if start is None:
            return None
        return world_pose(start.x_m, start.z_m, start.heading_degrees, start.pitch_degrees)
