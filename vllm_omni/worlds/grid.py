# SPDX-License-Identifier: Apache-2.0
"""`OccupancyGrid`: the parts of a world's ground that cannot be entered.

The grid is stored as an image next to `world.json`. In the image, north is up, the position (0, 0)
is in the centre, and blocked cells are black. The world repeats after the side length of the grid.
Except for file access, this module needs only torch.
"""

# P positions, W cells along a side of a window

import math
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

    @property
    def cell_m(self) -> float:
        """Shorter side of a cell in metres."""
        return self.side_m / max(self.cells.shape)

    def blocked(self, positions_2: torch.Tensor) -> torch.Tensor:
        """Return whether positions are in blocked cells.

        Args:
            positions_2: x and z positions in metres, fp64 [..., 2].

        Returns:
            Whether each position is in a blocked cell, bool [...].
        """
        rows, columns = self.cells.shape
        down, right = self._in_cells(positions_2)
        return self.cells[down.long().clamp(max=rows - 1), right.long().clamp(max=columns - 1)]

    def distance_to_free(self, positions_2: torch.Tensor, most_cells: int) -> torch.Tensor:
        """Return the distance from positions to the nearest free cell.

        The free cells are searched in a window around each position. The window grows until it
        contains the nearest free cell, so the cost depends on the distance and not on the size of
        the grid.

        Args:
            positions_2: x and z positions in metres, fp64 [..., 2].
            most_cells: Largest distance to search, in cells.

        Returns:
            The distances in metres, fp64 [...]: 0 in a free cell, and infinite if there is no free
            cell within `most_cells`.
        """
        rows, columns = self.cells.shape
        down_P, right_P = self._in_cells(positions_2.reshape(-1, 2))
        most_cells = min(most_cells, (max(rows, columns) + 1) // 2)
        radius = 1
        while True:
            offsets_W = torch.arange(-radius, radius + 1)
            row_PW = down_P.long().clamp(max=rows - 1)[:, None] + offsets_W
            column_PW = right_P.long().clamp(max=columns - 1)[:, None] + offsets_W
            z_PW = _gap(down_P[:, None], row_PW) * (self.side_m / rows)
            x_PW = _gap(right_P[:, None], column_PW) * (self.side_m / columns)
            blocked_PWW = self.cells[row_PW[:, :, None] % rows, column_PW[:, None] % columns]
            distance_PWW = torch.hypot(z_PW[:, :, None], x_PW[:, None])
            distance_P = distance_PWW.masked_fill(blocked_PWW, math.inf).amin(dim=(1, 2))
            # Cells outside the window are farther away than `radius` cells.
            is_exact = bool((distance_P <= radius * self.cell_m).all())
            if is_exact or radius >= most_cells:
                return distance_P.view(positions_2.shape[:-1])
            radius = min(2 * radius, most_cells)

    def _in_cells(self, positions_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distances of positions from the northern and the western edge, in cells."""
        rows, columns = self.cells.shape
        share = torch.remainder(positions_2 / self.side_m + 0.5, 1.0)
        return (1.0 - share[..., 1]) * rows, share[..., 0] * columns

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


def _gap(position: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
    """Return the distance along an axis from positions to cells, in cells: 0 within a cell."""
    return torch.maximum(cell - position, position - (cell + 1)).clamp(min=0)
