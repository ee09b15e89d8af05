# SPDX-License-Identifier: Apache-2.0
"""`OccupancyGrid`: which parts of a world's ground cannot be entered.

Stored as an image next to `world.json`, north up, (0, 0) in the middle, black where the way is blocked. The world
repeats after its side. Needs torch alone, but for reading and writing files. Held by tests/worlds/test_movement.py.
"""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class OccupancyGrid:
    """cells: bool [rows, columns], True = blocked; row 0 is the northern edge. side_m: metres of the grid's side."""

    cells: torch.Tensor
    side_m: float

    def blocked(self, positions_2: torch.Tensor) -> torch.Tensor:
        """Return whether positions x, z in metres, fp64 [..., 2], lie in blocked cells, bool [...]."""
        rows, columns = self.cells.shape
        share = torch.remainder(positions_2 / self.side_m + 0.5, 1.0)
        column = (share[..., 0] * columns).long().clamp(max=columns - 1)
        row = ((1.0 - share[..., 1]) * rows).long().clamp(max=rows - 1)
        return self.cells[row, column]

    @classmethod
    def read(cls, path: Path, side_m: float) -> "OccupancyGrid":
        """Read an image file. Raises ValueError in one line."""
        import numpy as np
        from PIL import Image

        try:
            with Image.open(path) as image:
                values = np.array(image.convert("L"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read as an occupancy grid: {error}") from error
        return cls(torch.from_numpy(values < 128), side_m)

    def write(self, path: Path) -> None:
        """Write an image file of one bit per cell."""
        from PIL import Image

        pixels = (~self.cells).byte().mul(255).numpy()
        Image.fromarray(pixels, "L").convert("1", dither=Image.Dither.NONE).save(path, optimize=True)
