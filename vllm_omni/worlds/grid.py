# SPDX-License-Identifier: Apache-2.0
"""`OccupancyGrid`: the parts of a world's ground that cannot be entered.

The grid is stored as an image next to `world.json`. In the image, north is up, the position (0, 0)
is in the centre, and blocked cells are black. The world repeats after the side length of the grid.
Except for file access, this module needs only torch.
"""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class OccupancyGrid:
    """Grid of blocked and free cells on the ground."""

    cells: torch.Tensor
    """Whether each cell is blocked, bool [rows, columns]. Row 0 is the northern edge."""
    side_m: float
    """Side length of the grid in metres."""

    def blocked(self, positions_2: torch.Tensor) -> torch.Tensor:
        """Return whether positions are in blocked cells.

        Args:
            positions_2: x and z positions in metres, fp64 [..., 2].

        Returns:
            Whether each position is in a blocked cell, bool [...].
        """
        rows, columns = self.cells.shape
        share = torch.remainder(positions_2 / self.side_m + 0.5, 1.0)
        column = (share[..., 0] * columns).long().clamp(max=columns - 1)
        row = ((1.0 - share[..., 1]) * rows).long().clamp(max=rows - 1)
        return self.cells[row, column]

    @classmethod
    def read_image(cls, path: Path, side_m: float) -> "OccupancyGrid":
        """Read a grid from an image file.

        Raises:
            ValueError: The file cannot be read. The message is one line.
        """
        import numpy as np
        from PIL import Image

        try:
            with Image.open(path) as image:
                values = np.array(image.convert("L"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read as an occupancy grid: {error}") from error
        return cls(torch.from_numpy(values < 128), side_m)

    def write(self, path: Path) -> None:
        """Write the grid to an image file with one bit per cell."""
        from PIL import Image

        pixels = (~self.cells).byte().mul(255).numpy()
        Image.fromarray(pixels, "L").convert("1", dither=Image.Dither.NONE).save(
            path, optimize=True
        )
