# SPDX-License-Identifier: Apache-2.0
"""The village: its objects, their positions, and their colours in each of the three styles.

The village fills a square with sides of `PERIOD` metres that repeats in both directions. Houses
stand around a large open square, so cameras rarely come close to a wall. A church with a spire, a
striped tower, a pond and hills on the horizon make the directions distinguishable. The axes are
those of `camera.py`: x right (east), y down, z forward (north), and the ground is `EYE_HEIGHT`
below the camera. The village is computed from constants only, so its tensors are the same on every
machine. Tested by tests/training/tiny_world/test_render.py.
"""

# O polyhedra, P = 6 planes of each, E ellipsoids, S styles

import math
from dataclasses import dataclass, field

import torch

PERIOD = 30.0
"""Distance in metres after which the village repeats."""
EYE_HEIGHT = 1.6
PITCH_LIMIT_DEGREES = 40.0
"""Largest angle in degrees by which the camera in the served world can look up or down.

The range is limited because clouds form rings around the zenith and the ground directly below a
camera has only one colour. Random training walks look further up and down, so the limit is not at
the edge of the training data.
"""
STYLES = ("day", "dusk", "snow")

PLAIN, WALL, ROOF, STRIPES = range(4)
"""Patterns that the faces of a polyhedron can have."""

Colour = tuple[float, float, float]
WALLS: tuple[Colour, ...] = (
    (0.93, 0.90, 0.82),
    (0.88, 0.66, 0.30),
    (0.76, 0.34, 0.28),
    (0.50, 0.66, 0.80),
    (0.90, 0.78, 0.55),
    (0.62, 0.72, 0.52),
    (0.84, 0.55, 0.55),
    (0.70, 0.62, 0.78),
    (0.95, 0.86, 0.40),
)
ROOFS: tuple[Colour, ...] = (
    (0.66, 0.22, 0.16),
    (0.36, 0.30, 0.30),
    (0.52, 0.32, 0.18),
    (0.70, 0.30, 0.20),
    (0.28, 0.34, 0.42),
    (0.60, 0.25, 0.20),
    (0.32, 0.27, 0.25),
    (0.48, 0.20, 0.20),
    (0.25, 0.38, 0.45),
)

# (x, z, half width, half depth, wall height, heading in degrees)
HOUSES = (
    (-8.5, 7.5, 2.4, 1.9, 2.6, 10.0),
    (0.5, 10.5, 2.8, 1.9, 2.8, -4.0),
    (9.0, 7.0, 2.1, 2.5, 2.5, 15.0),
    (11.0, -1.0, 1.9, 2.6, 3.0, -6.0),
    (8.0, -9.0, 2.6, 2.0, 2.5, -20.0),
    (-1.5, -10.5, 2.2, 2.1, 2.7, 5.0),
    (-10.5, -1.5, 1.9, 2.4, 2.5, 3.0),
)
CHURCH = (-9.5, -10.0, 1.9, 2.9, 3.4, 30.0)
TOWER = (12.0, 12.5, 1.0, 8.5)
"""Tower as (x, z, half width, height) in metres."""
POND = (3.8, -4.6, 2.0, 1.4)
"""Pond as (x, z, half axes) in metres. Cameras cannot enter it."""
# (x, z, height of the crown's middle, radius)
TREES = (
    (-4.6, 4.2, 2.7, 1.3),
    (4.9, 4.6, 3.0, 1.4),
    (-5.2, -4.4, 2.5, 1.15),
    (6.0, -3.0, 2.3, 0.95),
    (13.6, 3.6, 2.8, 1.3),
    (-13.2, 3.2, 3.0, 1.4),
    (4.6, 13.6, 2.6, 1.2),
    (-4.6, 13.4, 2.8, 1.3),
    (-13.6, -6.4, 2.6, 1.2),
    (3.6, -13.0, 2.9, 1.35),
    (13.4, -6.0, 2.5, 1.1),
    (-12.8, 12.8, 3.1, 1.5),
)
PINES = ((-13.8, 8.2, 4.6), (13.9, -12.6, 5.2), (7.4, 12.6, 4.4), (-5.4, -13.6, 4.8))
"""Pines as (x, z, height) in metres."""
BUSHES = (
    (-6.2, 9.6, 0.6),
    (2.9, 7.9, 0.55),
    (6.6, 9.4, 0.6),
    (9.0, 1.6, 0.5),
    (-8.1, -3.9, 0.55),
    (0.9, -8.0, 0.5),
)
WELL = (0.0, 0.6, 0.75)
"""Well as (x, z, half width) in metres."""


def wrap(offset: torch.Tensor) -> torch.Tensor:
    """Return the offset in metres, along one axis, to the nearest copy of an object that is
    `offset` away.
    """
    return offset - PERIOD * torch.round(offset / PERIOD)


@dataclass(frozen=True)
class Village:
    """All inputs of the ray caster, in fp32 and on one device.

    A point p is inside a polyhedron if normal . (p - centre) <= offset for all six planes in
    `normals_OP3` and `offsets_OP`. `albedo_SO3` holds the colours of faces, and `accent_SO3` holds
    those of windows, gables or stripes. `obstacles_N6` holds walls and trunks as (x, z, half width,
    half depth, heading, clearance for walkers).
    """

    centres_O3: torch.Tensor
    normals_OP3: torch.Tensor
    offsets_OP: torch.Tensor
    radius_O: torch.Tensor
    pattern_O: torch.Tensor
    albedo_SO3: torch.Tensor
    accent_SO3: torch.Tensor
    ellipsoid_centres_E3: torch.Tensor
    ellipsoid_radii_E3: torch.Tensor
    ellipsoid_colour_SE3: torch.Tensor
    obstacles_N6: torch.Tensor

    @classmethod
    def build(cls, device: torch.device | str = "cpu") -> "Village":
        parts = _Parts()
        for index, (x, z, width, depth, height, heading) in enumerate(HOUSES):
            parts.house(x, z, width, depth, height, heading, WALLS[index], ROOFS[index])
        parts.church(*CHURCH)
        parts.tower(*TOWER)
        for x, z, height, radius in TREES:
            parts.tree(x, z, height, radius)
        for x, z, height in PINES:
            parts.pine(x, z, height)
        for x, z, radius in BUSHES:
            parts.ellipsoid(
                (x, radius * 0.7, z), (radius, radius * 0.8, radius), (0.20, 0.42, 0.16)
            )
        parts.well(*WELL)
        parts.obstacle(POND[0], POND[1], POND[2] * 0.85, POND[3] * 0.85, 0.0, 0.3)
        return parts.village(torch.device(device))


@dataclass
class _Parts:
    """Collects the village's primitives. Heights in this class are measured upwards from the
    ground.
    """

    centres: list[tuple[float, float, float]] = field(default_factory=list)
    planes: list[list[tuple[float, float, float, float]]] = field(default_factory=list)
    radii: list[float] = field(default_factory=list)
    patterns: list[int] = field(default_factory=list)
    albedo: list[Colour] = field(default_factory=list)
    accent: list[Colour] = field(default_factory=list)
    ellipsoids: list[tuple[tuple[float, float, float], tuple[float, float, float], Colour]] = field(
        default_factory=list
    )
    obstacles: list[tuple[float, float, float, float, float, float]] = field(default_factory=list)

    def obstacle(
        self, x: float, z: float, width: float, depth: float, heading: float, clearance: float
    ) -> None:
        self.obstacles.append((x, z, width, depth, math.radians(heading), clearance))

    def polyhedron(
        self,
        centre: tuple[float, float, float],
        heading: float,
        local: list[tuple[float, float, float, float]],
        radius: float,
        pattern: int,
        albedo: Colour,
        accent: Colour,
    ) -> None:
        """Add a polyhedron. `local` holds its planes (nx, n up, nz, offset) in the object's own
        axes, which are turned by `heading` degrees.
        """
        cos, sin = math.cos(math.radians(heading)), math.sin(math.radians(heading))
        planes = [
            (cos * nx + sin * nz, -up, -sin * nx + cos * nz, offset) for nx, up, nz, offset in local
        ]
        planes += [planes[-1]] * (6 - len(planes))
        self.centres.append((centre[0], EYE_HEIGHT - centre[1], centre[2]))
        self.planes.append(planes)
        self.radii.append(radius)
        self.patterns.append(pattern)
        self.albedo.append(albedo)
        self.accent.append(accent)

    def box(
        self,
        centre: tuple[float, float, float],
        half: tuple[float, float, float],
        heading: float,
        pattern: int,
        albedo: Colour,
        accent: Colour = (0.0, 0.0, 0.0),
    ) -> None:
        x, y, z = half
        local = [
            (1.0, 0.0, 0.0, x),
            (-1.0, 0.0, 0.0, x),
            (0.0, 0.0, 1.0, z),
            (0.0, 0.0, -1.0, z),
            (0.0, 1.0, 0.0, y),
            (0.0, -1.0, 0.0, y),
        ]
        self.polyhedron(centre, heading, local, math.hypot(x, y, z), pattern, albedo, accent)

    def gable(
        self,
        x: float,
        z: float,
        eaves: float,
        half: tuple[float, float, float],
        heading: float,
        roof: Colour,
        wall: Colour,
    ) -> None:
        """Add a roof with its ridge along the object's z axis. `half` is (width, rise / 2, depth).

        The gable ends have the wall pattern.
        """
        width, rise, depth = half[0], 2 * half[1], half[2]
        slope = math.hypot(width, rise)
        up, out = width / slope, rise / slope
        local = [
            (0.0, 0.0, 1.0, depth),
            (0.0, 0.0, -1.0, depth),
            (out, up, 0.0, up * rise),
            (-out, up, 0.0, up * rise),
            (0.0, -1.0, 0.0, 0.0),
        ]
        self.polyhedron(
            (x, eaves, z), heading, local, math.hypot(width, rise, depth), ROOF, roof, wall
        )

    def pyramid(
        self,
        x: float,
        z: float,
        base: float,
        half: float,
        rise: float,
        heading: float,
        albedo: Colour,
    ) -> None:
        slope = math.hypot(half, rise)
        up, out = half / slope, rise / slope
        local = [
            (sx * out, up, sz * out, up * rise) for sx, sz in ((1, 0), (-1, 0), (0, 1), (0, -1))
        ]
        self.polyhedron(
            (x, base, z),
            heading,
            [*local, (0.0, -1.0, 0.0, 0.0)],
            math.hypot(half * 1.42, rise),
            PLAIN,
            albedo,
            albedo,
        )

    def ellipsoid(
        self, centre: tuple[float, float, float], radii: tuple[float, float, float], colour: Colour
    ) -> None:
        self.ellipsoids.append(((centre[0], EYE_HEIGHT - centre[1], centre[2]), radii, colour))

    def house(
        self,
        x: float,
        z: float,
        width: float,
        depth: float,
        height: float,
        heading: float,
        wall: Colour,
        roof: Colour,
    ) -> None:
        self.box(
            (x, height / 2, z), (width, height / 2, depth), heading, WALL, wall, (0.25, 0.32, 0.40)
        )
        self.gable(x, z, height, (width + 0.25, 0.75, depth + 0.2), heading, roof, wall)
        turn = math.radians(heading)
        chimney = (
            x + 0.9 * math.cos(turn) + 0.8 * math.sin(turn),
            height + 1.0,
            z - 0.9 * math.sin(turn) + 0.8 * math.cos(turn),
        )
        self.box(chimney, (0.25, 0.75, 0.25), heading, PLAIN, (0.50, 0.30, 0.25))
        self.obstacle(x, z, width, depth, heading, 1.3)

    def church(
        self, x: float, z: float, width: float, depth: float, height: float, heading: float
    ) -> None:
        white, slate = (0.94, 0.93, 0.90), (0.20, 0.38, 0.62)
        self.box(
            (x, height / 2, z), (width, height / 2, depth), heading, WALL, white, (0.25, 0.28, 0.45)
        )
        self.gable(x, z, height, (width + 0.2, 0.9, depth + 0.2), heading, slate, white)
        turn = math.radians(heading)
        tx, tz = x + (depth + 1.0) * math.sin(turn), z + (depth + 1.0) * math.cos(turn)
        self.box((tx, 3.0, tz), (1.1, 3.0, 1.1), heading, WALL, white, (0.25, 0.28, 0.45))
        self.pyramid(tx, tz, 6.0, 1.25, 3.6, heading, slate)
        self.obstacle(x, z, width, depth, heading, 1.3)
        self.obstacle(tx, tz, 1.1, 1.1, heading, 1.3)

    def tower(self, x: float, z: float, half: float, height: float) -> None:
        self.box(
            (x, height / 2, z),
            (half, height / 2, half),
            45.0,
            STRIPES,
            (0.93, 0.92, 0.90),
            (0.80, 0.16, 0.14),
        )
        self.pyramid(x, z, height, half * 1.35, 1.6, 45.0, (0.30, 0.10, 0.10))
        self.obstacle(x, z, half, half, 45.0, 1.2)

    def tree(self, x: float, z: float, height: float, radius: float) -> None:
        self.box((x, height / 2, z), (0.17, height / 2, 0.17), 20.0, PLAIN, (0.36, 0.24, 0.15))
        green = (0.22 + 0.05 * math.sin(7 * x), 0.46 + 0.06 * math.sin(5 * z), 0.15)
        self.ellipsoid((x, height, z), (radius, radius * 0.95, radius), green)
        self.obstacle(x, z, 0.17, 0.17, 0.0, 0.8)

    def pine(self, x: float, z: float, height: float) -> None:
        self.box((x, 0.5, z), (0.16, 0.5, 0.16), 0.0, PLAIN, (0.33, 0.22, 0.14))
        self.pyramid(x, z, 0.8, 1.15, height - 0.8, 20.0, (0.10, 0.34, 0.20))
        self.obstacle(x, z, 0.5, 0.5, 0.0, 0.7)

    def well(self, x: float, z: float, half: float) -> None:
        stone = (0.62, 0.60, 0.58)
        self.box((x, 0.45, z), (half, 0.45, half), 0.0, PLAIN, stone)
        for side in (-1, 1):
            self.box(
                (x + side * (half - 0.1), 1.2, z), (0.09, 1.2, 0.09), 0.0, PLAIN, (0.40, 0.26, 0.16)
            )
        self.gable(
            x, z, 2.3, (half + 0.3, 0.3, half + 0.2), 90.0, (0.62, 0.20, 0.55), (0.45, 0.30, 0.20)
        )
        self.obstacle(x, z, half, half, 0.0, 0.9)

    def village(self, device: torch.device) -> Village:
        def tensor(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        planes = tensor(self.planes)
        albedo, accent = tensor(self.albedo), tensor(self.accent)
        colours = tensor([colour for _, _, colour in self.ellipsoids])
        pattern = torch.tensor(self.patterns, device=device)
        lit = tensor([1.0, 0.82, 0.40])
        windows = (pattern == WALL)[:, None]
        return Village(
            centres_O3=tensor(self.centres),
            normals_OP3=planes[..., :3].contiguous(),
            offsets_OP=planes[..., 3].contiguous(),
            radius_O=tensor(self.radii),
            pattern_O=pattern,
            albedo_SO3=torch.stack((albedo, albedo, albedo * 0.95)),
            accent_SO3=torch.stack((accent, torch.where(windows, lit, accent), accent)),
            ellipsoid_centres_E3=tensor([centre for centre, _, _ in self.ellipsoids]),
            ellipsoid_radii_E3=tensor([radii for _, radii, _ in self.ellipsoids]),
            ellipsoid_colour_SE3=torch.stack(
                (colours, colours, colours * 0.4 + tensor([0.50, 0.53, 0.56]))
            ),
            obstacles_N6=tensor(self.obstacles),
        )
