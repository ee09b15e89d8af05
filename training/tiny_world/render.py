# SPDX-License-Identifier: Apache-2.0
"""A ray caster for the village: poses in, pictures out, the same on a CPU and on a GPU.

Every frame casts 2x2 rays a pixel. The polyhedra and ellipsoids nearest to the camera (each with its repetitions in
the periodic ground plane) are tested by slabs; what is hit is shaded by its face's direction, the ground and its baked
sun shadows come from a mip-mapped texture, sky and hills depend on the direction alone. Two functions do the work and
are compiled by torch into a few fused kernels; without a compiler they run as they stand, slower.
Held by tests/training/test_tiny_world_renderer.py.
"""

# B frames, R rays, K nearest polyhedra, J nearest ellipsoids, P planes, S styles

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from training.tiny_world.village import EYE_HEIGHT, PERIOD, POND, ROOF, STRIPES, WALL, Village

FOCAL = 0.65
"""Focal length over the picture's width: 75 degrees."""
_FOG_M = 19.0
_NEAREST = (52, 28)
"""Polyhedra and ellipsoids kept for a frame."""
_TEXELS = 512
_LEVELS = 6
_FAR = 1e4


@dataclass(frozen=True)
class Light:
    """How a style is lit: direction to the sun, colours in [0, 1]."""

    sun_3: tuple[float, float, float]
    sunlight: tuple[float, float, float]
    ambient: tuple[float, float, float]
    zenith: tuple[float, float, float]
    horizon: tuple[float, float, float]
    hills: tuple[float, float, float]
    grass: tuple[float, float, float]
    path: tuple[float, float, float]
    water: tuple[float, float, float]
    snow: float


LIGHTS = (
    Light(
        (0.45, -0.75, -0.48), (0.78, 0.74, 0.64), (0.42, 0.45, 0.50), (0.27, 0.50, 0.86), (0.74, 0.86, 0.95),
        (0.36, 0.52, 0.50), (0.36, 0.56, 0.22), (0.74, 0.64, 0.48), (0.22, 0.42, 0.60), 0.0,
    ),
    Light(
        (-0.88, -0.30, 0.37), (0.78, 0.40, 0.16), (0.26, 0.22, 0.34), (0.16, 0.13, 0.34), (0.95, 0.52, 0.28),
        (0.22, 0.14, 0.28), (0.30, 0.40, 0.20), (0.60, 0.50, 0.42), (0.20, 0.20, 0.36), 0.0,
    ),
    Light(
        (0.30, -0.60, 0.74), (0.34, 0.34, 0.34), (0.60, 0.62, 0.66), (0.66, 0.72, 0.80), (0.90, 0.92, 0.95),
        (0.78, 0.82, 0.88), (0.92, 0.94, 0.97), (0.66, 0.62, 0.60), (0.60, 0.72, 0.82), 1.0,
    ),
)  # fmt: skip


class Renderer:
    """Renders frames of the village on one device.

    height, width: pixels of the output. compiled: fuse with torch.compile; None = on CUDA only.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        height: int = 96,
        width: int = 160,
        *,
        compiled: bool | None = None,
        frames_per_call: int = 32,
    ) -> None:
        self.device = torch.device(device)
        self.height, self.width = height, width
        self.village = Village.build(self.device)
        self.frames_per_call = frames_per_call
        compiled = self.device.type == "cuda" if compiled is None else compiled
        self._cast = torch.compile(_cast, dynamic=False) if compiled else _cast
        self._shade = torch.compile(_shade, dynamic=False) if compiled else _shade

    def render(self, positions_B2: torch.Tensor, yaw_B: torch.Tensor, pitch_B: torch.Tensor, style_B: torch.Tensor) -> torch.Tensor:
        """Return frames uint8 [B, height, width, 3] on the device.

        positions: x, z in metres; yaw to the right and pitch upwards in radians; style: index into `STYLES`.
        """
        out = torch.empty(len(yaw_B), self.height, self.width, 3, dtype=torch.uint8, device=self.device)
        step = self.frames_per_call
        for begin in range(0, len(yaw_B), step):
            views = [value[begin : begin + step].to(self.device) for value in (positions_B2, yaw_B, pitch_B, style_B)]
            count = len(views[1])
            if count < step:  # one shape, so that nothing is compiled twice
                views = [torch.cat((value, value[-1:].expand(step - count, *value.shape[1:]))) for value in views]
            out[begin : begin + count] = self._frames(*views)[:count]
        return out

    def _frames(self, positions: torch.Tensor, yaw: torch.Tensor, pitch: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        positions, yaw, pitch, style = positions.float(), yaw.float(), pitch.float(), style.long()
        village = self.village
        rays_BR3 = _rotate(self._rays_R3, yaw, pitch)
        normals, offsets, which = _nearest_polyhedra(village, positions)
        centres, radii, ball = _nearest_ellipsoids(village, positions)
        distance, index = self._cast(rays_BR3, normals, offsets, centres, radii)
        facing = normals.shape[1]
        solid = index.clamp(max=facing - 1)
        hit_normals = torch.gather(normals, 1, solid[..., None, None].expand(*solid.shape, 6, 3))
        hit_offsets = torch.gather(offsets, 1, solid[..., None].expand(*solid.shape, 6))
        original = torch.gather(which, 1, solid)
        round_one = (index - facing).clamp(min=0)
        hit_centres = torch.gather(centres, 1, round_one[..., None].expand(*round_one.shape, 3))
        hit_radii = torch.gather(radii, 1, round_one[..., None].expand(*round_one.shape, 3))
        leaf = torch.gather(ball, 1, round_one)
        style_R = style[:, None]
        linear = self._shade(
            rays_BR3, distance, index >= facing, hit_normals, hit_offsets, hit_centres, hit_radii,
            village.pattern_O[original], village.albedo_SO3[style_R, original], village.accent_SO3[style_R, original],
            village.ellipsoid_colour_SE3[style_R, leaf], positions, style, self._ground, self._lights, 2 * self.width * FOCAL,
        )  # fmt: skip
        pixels = linear.view(len(yaw), self.height, 2, self.width, 2, 3).mean(dim=(2, 4))
        return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)

    @cached_property
    def _rays_R3(self) -> torch.Tensor:
        """Unit directions of all rays in camera axes, rows first."""
        focal = 2 * self.width * FOCAL
        u = (torch.arange(2 * self.width, device=self.device) + 0.5 - self.width) / focal
        v = (torch.arange(2 * self.height, device=self.device) + 0.5 - self.height) / focal
        y, x = torch.meshgrid(v, u, indexing="ij")
        return torch.nn.functional.normalize(torch.stack((x, y, torch.ones_like(x)), dim=-1).view(-1, 3), dim=1)

    @cached_property
    def _lights(self) -> torch.Tensor:
        """fp32 [S, 8, 3]: sun direction, sunlight, ambient, zenith, horizon, hills, water, snow."""
        rows = []
        for light in LIGHTS:
            norm = math.hypot(*light.sun_3)
            sun = tuple(value / norm for value in light.sun_3)
            rows.append((sun, light.sunlight, light.ambient, light.zenith, light.horizon, light.hills, light.water, (light.snow,) * 3))
        return torch.tensor(rows, device=self.device)

    @cached_property
    def _ground(self) -> torch.Tensor:
        """The ground's colours as lit, fp32 [S, texels of all levels, 4]; the fourth channel is water."""
        lights = self._lights
        cells = (torch.arange(_TEXELS, device=self.device) + 0.5) * (PERIOD / _TEXELS)
        z, x = torch.meshgrid(cells, cells, indexing="ij")
        here = torch.stack((x, z), dim=-1).view(-1, 2)
        path, water, patches = _ground_masks(here)
        levels = []
        for index, light in enumerate(LIGHTS):
            grass = torch.tensor(light.grass, device=self.device) * (1 + (0.16 if light.snow == 0 else 0.04) * patches[:, None])
            albedo = torch.lerp(grass, torch.tensor(light.path, device=self.device), path[:, None])
            sun = lights[index, 0]
            shadow = self._in_shadow(sun)
            lit = lights[index, 2] + lights[index, 1] * (-sun[1] * (1 - 0.85 * shadow))[:, None]
            colour = torch.lerp(albedo * lit, lights[index, 6].expand_as(albedo), water[:, None])
            levels.append(torch.cat((colour, water[:, None]), dim=1))
        image = torch.stack(levels).view(len(LIGHTS), _TEXELS, _TEXELS, 4).permute(0, 3, 1, 2)
        flat = []
        for _ in range(_LEVELS):
            flat.append(image.permute(0, 2, 3, 1).reshape(len(LIGHTS), -1, 4))
            image = torch.nn.functional.avg_pool2d(image, 2)
        return torch.cat(flat, dim=1).contiguous()

    def _in_shadow(self, sun_3: torch.Tensor) -> torch.Tensor:
        """How much of each texel's sunlight is blocked, [texels]; cast at half the texture's resolution."""
        side = _TEXELS // 2
        shadow = torch.zeros(side * side, device=self.device)
        village = self.village
        for index, radius in enumerate(village.radius_O.tolist()):
            x, z, where = _shadow_patch(village.centres_O3[index], radius, sun_3, side)
            normals, offsets = village.normals_OP3[index], village.offsets_OP[index]
            ground = torch.stack((x, torch.full_like(x, EYE_HEIGHT - 0.01), z), dim=1) - village.centres_O3[index]
            enter, leave, _ = _slabs(sun_3.expand(len(x), 3), normals[None], offsets - ground @ normals.mT)
            shadow.scatter_reduce_(0, where, ((enter < leave) & (leave > 0)).float(), "amax")
        for centre_3, radii_3 in zip(village.ellipsoid_centres_E3, village.ellipsoid_radii_E3, strict=True):
            x, z, where = _shadow_patch(centre_3, float(radii_3.max()), sun_3, side)
            c = (centre_3 - torch.stack((x, torch.full_like(x, EYE_HEIGHT - 0.01), z), dim=1)) / radii_3
            q = sun_3 / radii_3
            qc, qq = c @ q, (q * q).sum()
            meets = (qc * qc - qq * ((c * c).sum(-1) - 1) > 0) & (qc > 0)
            shadow.scatter_reduce_(0, where, meets.float(), "amax")
        image = torch.nn.functional.pad(shadow.view(1, 1, side, side), (1, 1, 1, 1), mode="circular")
        image = torch.nn.functional.interpolate(image, scale_factor=2.0, mode="bilinear", align_corners=False)
        return image[0, 0, 2:-2, 2:-2].reshape(-1)


def _shadow_patch(centre_3: torch.Tensor, radius: float, sun_3: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Points x, z of the ground that a body can shade, each [n], and the index of the texel each lies in."""
    sx, sy, sz = sun_3.tolist()
    x, y, z = centre_3.tolist()
    reach = (EYE_HEIGHT - y + radius) / -sy  # the shadow ends so many times the sun's horizontal part away
    low_x, high_x = sorted((x, x - sx * reach))
    low_z, high_z = sorted((z, z - sz * reach))
    texel = PERIOD / side

    def cells(low: float, high: float) -> torch.Tensor:
        return torch.arange(math.floor((low - radius) / texel), math.ceil((high + radius) / texel), device=centre_3.device)

    rows, columns = torch.meshgrid(cells(low_z, high_z), cells(low_x, high_x), indexing="ij")
    where = torch.remainder(rows, side) * side + torch.remainder(columns, side)
    return (columns.flatten() + 0.5) * texel, (rows.flatten() + 0.5) * texel, where.flatten()


def _rotate(rays_R3: torch.Tensor, yaw_B: torch.Tensor, pitch_B: torch.Tensor) -> torch.Tensor:
    """Camera axes -> world axes: pitch about x, then yaw about y, as `camera.py` composes held keys."""
    cp, sp = pitch_B.cos()[:, None], pitch_B.sin()[:, None]
    cy, sy = yaw_B.cos()[:, None], yaw_B.sin()[:, None]
    x, y, z = rays_R3.unbind(1)
    y2, z2 = cp * y - sp * z, sp * y + cp * z
    return torch.stack((cy * x + sy * z2, y2, -sy * x + cy * z2), dim=-1)


def _wrap(offset: torch.Tensor) -> torch.Tensor:
    return offset - PERIOD * torch.round(offset / PERIOD)


def _copies(centres_N3: torch.Tensor, positions_B2: torch.Tensor) -> torch.Tensor:
    """Centres as seen from each camera, [B, 4 N, 3]: the nearest copy and the next one along each axis."""
    dx = _wrap(centres_N3[:, 0] - positions_B2[:, :1])
    dz = _wrap(centres_N3[:, 2] - positions_B2[:, 1:])
    y = centres_N3[:, 1].expand_as(dx)
    xs = (dx, dx - PERIOD * torch.where(dx >= 0, 1.0, -1.0))
    zs = (dz, dz - PERIOD * torch.where(dz >= 0, 1.0, -1.0))
    return torch.cat([torch.stack((a, y, b), dim=-1) for a in xs for b in zs], dim=1)


def _closest(centres_BN3: torch.Tensor, radius_N: torch.Tensor, keep: int) -> torch.Tensor:
    distance = centres_BN3[..., [0, 2]].norm(dim=-1) - radius_N
    return distance.topk(min(keep, distance.shape[1]), dim=1, largest=False).indices


def _nearest_polyhedra(village: Village, positions_B2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normals [B, K, P, 3], offsets [B, K, P] with the camera at the origin, and which polyhedron each is [B, K]."""
    centres = _copies(village.centres_O3, positions_B2)
    chosen = _closest(centres, village.radius_O.repeat(4), _NEAREST[0])
    which = chosen % len(village.centres_O3)
    here = torch.gather(centres, 1, chosen[..., None].expand(*chosen.shape, 3))
    normals = village.normals_OP3[which]
    offsets = village.offsets_OP[which] + (normals * here[:, :, None]).sum(-1)
    return normals, offsets, which


def _nearest_ellipsoids(village: Village, positions_B2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    centres = _copies(village.ellipsoid_centres_E3, positions_B2)
    chosen = _closest(centres, village.ellipsoid_radii_E3[:, 0].repeat(4), _NEAREST[1])
    which = chosen % len(village.ellipsoid_centres_E3)
    return torch.gather(centres, 1, chosen[..., None].expand(*chosen.shape, 3)), village.ellipsoid_radii_E3[which], which


def _slabs(rays: torch.Tensor, normals: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where rays from the origin enter and leave convex bodies, and the plane they enter by. Last axis of offsets: P."""
    enter = torch.full_like(offsets[..., 0] * rays[..., 0], -_FAR)
    leave = torch.full_like(enter, _FAR)
    face = torch.zeros_like(enter)
    for plane in range(6):
        n, d = normals[..., plane, :], offsets[..., plane]
        along = rays[..., 0] * n[..., 0] + rays[..., 1] * n[..., 1] + rays[..., 2] * n[..., 2]
        t = d / torch.where(along.abs() < 1e-6, torch.full_like(along, 1e-6), along)
        front = along < 0
        face = torch.where(front & (t > enter), float(plane), face)
        enter = torch.where(front, torch.maximum(enter, t), enter)
        leave = torch.where(front, leave, torch.minimum(leave, t))
    return enter, leave, face


def _cast(
    rays_BR3: torch.Tensor, normals: torch.Tensor, offsets: torch.Tensor, centres: torch.Tensor, radii: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance [B, R] to the nearest body and its index: polyhedra first, then ellipsoids; `_FAR` when nothing is hit."""
    rays = rays_BR3[:, :, None, :]
    enter, leave, _ = _slabs(rays, normals[:, None], offsets[:, None])
    solid = torch.where((enter < leave) & (enter > 0.02), enter, _FAR)
    q = rays / radii[:, None]
    c = (centres / radii)[:, None]
    qq, qc, cc = (q * q).sum(-1), (q * c).sum(-1), (c * c).sum(-1)
    inside = qc * qc - qq * (cc - 1)
    t = (qc - inside.clamp(min=0).sqrt()) / qq
    balls = torch.where((inside > 0) & (t > 0.02), t, _FAR)
    solid_distance, solid_index = solid.min(dim=2)
    ball_distance, ball_index = balls.min(dim=2)
    nearer = ball_distance < solid_distance
    return torch.minimum(solid_distance, ball_distance), torch.where(nearer, ball_index + normals.shape[1], solid_index)


def _ground_masks(here_N2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Paths, the pond, and soft patches of grass at points x, z: each [N], paths and pond in [0, 1]."""
    x, z = here_N2.unbind(1)
    turn = 2 * math.pi / PERIOD

    def edge(distance: torch.Tensor) -> torch.Tensor:
        return (0.5 - distance / 0.12).clamp(0, 1)

    street = _wrap(x - 1.6 - 1.5 * torch.sin(turn * z + 0.6)).abs() - 1.0
    lane = _wrap(z + 1.5 - 1.8 * torch.sin(turn * x)).abs() - 0.9
    square = torch.hypot(_wrap(x), _wrap(z - 0.6)) - 3.4
    path = edge(torch.minimum(torch.minimum(street, lane), square))
    px, pz, half_x, half_z = POND
    water = edge((torch.hypot(_wrap(x - px) / half_x, _wrap(z - pz) / half_z) - 1) * half_z)
    patches = torch.sin(turn * (3 * x + 2 * z)) * torch.sin(turn * (2 * x - 4 * z) + 1) + 0.5 * torch.sin(turn * 5 * z + 2)
    return path * (1 - water), water, patches


def _texture(ground: torch.Tensor, style: torch.Tensor, x: torch.Tensor, z: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Trilinear look-up of the periodic ground: [B, R, 4]."""
    low = level.floor().clamp(0, _LEVELS - 2)
    blend = (level - low).clamp(0, 1)[..., None]
    return torch.lerp(_bilinear(ground, style, x, z, low), _bilinear(ground, style, x, z, low + 1), blend)


def _bilinear(ground: torch.Tensor, style: torch.Tensor, x: torch.Tensor, z: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    side = _TEXELS / torch.exp2(level)
    # texels of the levels before: side0^2 (1 + 1/4 + ...) = 4/3 side0^2 (1 - 4^-level)
    begin = (_TEXELS * _TEXELS * 4 / 3 * (1 - torch.exp2(-2 * level))).round().long()
    u, v = x / PERIOD * side - 0.5, z / PERIOD * side - 0.5
    u0, v0 = u.floor(), v.floor()
    fu, fv = (u - u0)[..., None], (v - v0)[..., None]
    side_long = side.round().long()
    columns = [torch.remainder(u0 + step, side).long().clamp(max=side_long - 1) for step in (0, 1)]
    rows = [torch.remainder(v0 + step, side).long().clamp(max=side_long - 1) for step in (0, 1)]
    flat = ground.view(-1, 4)
    base = (style * ground.shape[1])[:, None] + begin
    (a, b), (c, d) = ([flat[base + row * side_long + column] for column in columns] for row in rows)
    return torch.lerp(torch.lerp(a, b, fu), torch.lerp(c, d, fu), fv)


def _sky(rays: torch.Tensor, lights: torch.Tensor) -> torch.Tensor:
    """Colour of the sky and the hills [B, R, 3] for directions; lights [B, 1, 8, 3]."""
    x, y, z = rays.unbind(-1)
    flat = torch.hypot(x, z).clamp(min=1e-6)
    up = -y / flat
    heading = torch.atan2(x, z)
    high = (up * 1.1).clamp(0, 1)[..., None].sqrt()
    sky = torch.lerp(lights[..., 4, :], lights[..., 3, :], high)
    towards = (rays * lights[..., 0, :]).sum(-1).clamp(min=0)
    glow = (towards**12 * 0.35 + ((towards - 0.9965) * 900).clamp(0, 1))[..., None]
    sky = sky + glow * lights[..., 1, :]
    drift = up * 6
    cloud = torch.sin(3 * heading + 0.7) * torch.sin(drift + torch.sin(5 * heading)) + 0.6 * torch.sin(7 * heading + 2 * drift)
    sky = torch.lerp(sky, lights[..., 4, :] * 1.05, ((cloud - 0.35) * 2.5).clamp(0, 0.75)[..., None] * (up * 5).clamp(0, 1)[..., None])
    near = 0.10 + 0.035 * torch.sin(3 * heading + 1) + 0.03 * torch.sin(7 * heading) + 0.015 * torch.sin(13 * heading + 2)
    peak = 0.24 * (1 - ((torch.remainder(heading - 0.6 + math.pi, 2 * math.pi) - math.pi).abs() / 0.32)).clamp(min=0)
    twin = 0.18 * (1 - ((torch.remainder(heading + 1.9 + math.pi, 2 * math.pi) - math.pi).abs() / 0.18)).clamp(min=0)
    far = 0.06 + torch.maximum(peak, twin)
    far_hills = torch.lerp(lights[..., 5, :], lights[..., 4, :], 0.45)
    cap = torch.where((up > far - 0.06)[..., None], far_hills * 0.4 + 0.6, far_hills)  # snow on the peaks
    sky = torch.where((up < far)[..., None], cap, sky)
    return torch.where((up < near)[..., None], lights[..., 5, :].expand_as(sky), sky)


def _shade(
    rays: torch.Tensor,
    distance: torch.Tensor,
    is_ball: torch.Tensor,
    normals: torch.Tensor,
    offsets: torch.Tensor,
    centres: torch.Tensor,
    radii: torch.Tensor,
    pattern: torch.Tensor,
    albedo: torch.Tensor,
    accent: torch.Tensor,
    leaves: torch.Tensor,
    positions: torch.Tensor,
    style: torch.Tensor,
    ground: torch.Tensor,
    all_lights: torch.Tensor,
    focal: float,
) -> torch.Tensor:
    """Colour [B, R, 3] of every ray; hits as gathered by the caller."""
    lights = all_lights[style][:, None]
    sky = _sky(rays, lights)
    point = rays * distance[..., None]

    # bodies with faces: which plane was entered decides normal and pattern
    _, _, face = _slabs(rays, normals, offsets)
    chosen = face.long()[..., None, None].expand(*face.shape, 1, 3)
    normal = torch.gather(normals, 2, chosen)[..., 0, :]
    # distances along the wall from its middle, whatever copy it is: the middle lies on the planes' offsets
    side = torch.where(face < 2, 2.0, 0.0)
    pair = torch.stack((side, side + 1), dim=-1).long()
    low = torch.gather(offsets, 2, pair)
    tangent = torch.gather(normals, 2, pair[..., :1, None].expand(*face.shape, 1, 3))[..., 0, :]
    middle = (low[..., 0] - low[..., 1]) / 2
    half = (low[..., 0] + low[..., 1]) / 2
    u = (point * tangent).sum(-1) - middle
    height = EYE_HEIGHT - point[..., 1]
    upright = normal[..., 1].abs() < 0.5
    count = (half / 0.85).floor().clamp(min=1)
    cell = (u + half) / (2 * half) * count
    in_window = ((cell - cell.floor() - 0.5).abs() < 0.26) & (u.abs() < half) & upright
    storey = torch.where(height > 3.4, height - 2.6, height)
    window = in_window & (storey > 1.05) & (storey < 1.95)
    frame = ((cell - cell.floor() - 0.5).abs() < 0.36) & (u.abs() < half) & upright & (storey > 0.93) & (storey < 2.07)
    door = (face == 3) & (u.abs() < 0.42) & (height < 1.9) & upright
    is_wall = pattern == WALL
    body = torch.where((is_wall & frame)[..., None], torch.ones_like(albedo) * 0.95, albedo)
    body = torch.where((is_wall & window)[..., None], accent, body)
    body = torch.where((is_wall & door)[..., None], torch.stack((0.30 + 0 * u, 0.17 + 0 * u, 0.10 + 0 * u), dim=-1), body)
    base = is_wall & (height < 0.35) & upright
    body = torch.where(base[..., None], albedo * 0.62, body)
    gable = (pattern == ROOF) & upright & (face < 2)
    body = torch.where(gable[..., None], accent, body)
    striped = (pattern == STRIPES) & (torch.remainder(height, 2.0) > 1.0)
    body = torch.where(striped[..., None], accent, body)
    lamp = is_wall & window & (style == 1)[:, None]

    # round bodies
    ball_normal = (point - centres) / (radii * radii)
    ball_normal = ball_normal / ball_normal.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    normal = torch.where(is_ball[..., None], ball_normal, normal)
    body = torch.where(is_ball[..., None], leaves, body)
    snowy = lights[..., 7, :] * (-normal[..., 1:2] * 2.2 - 0.25).clamp(0, 1)
    body = torch.lerp(body, torch.full_like(body, 0.95), snowy)
    facing = (normal * lights[..., 0, :]).sum(-1, keepdim=True).clamp(min=0)
    dome = 0.80 - 0.20 * normal[..., 1:2]
    lit = body * (lights[..., 2, :] * dome + lights[..., 1, :] * facing)
    lit = torch.where((lamp & ~is_ball)[..., None], accent * 1.05, lit)

    # the ground plane
    down = rays[..., 1].clamp(min=1e-6)
    to_ground = EYE_HEIGHT / down
    gx, gz = positions[:, :1] + rays[..., 0] * to_ground, positions[:, 1:] + rays[..., 2] * to_ground
    footprint = to_ground / focal / down.sqrt() * (_TEXELS / PERIOD)
    texel = _texture(ground, style, gx, gz, torch.log2(footprint.clamp(min=1.0)))
    mirror = _sky(rays * torch.tensor((1.0, -1.0, 1.0), device=rays.device), lights)
    earth = torch.lerp(texel[..., :3], mirror, texel[..., 3:] * 0.45)

    is_ground = (rays[..., 1] > 1e-4) & (to_ground < distance)
    reach = torch.where(is_ground, to_ground, distance)
    colour = torch.where(is_ground[..., None], earth, lit)
    fog = torch.exp(-((reach / _FOG_M) ** 3))[..., None]
    # the ground reaches the horizon, where the hills begin
    haze = torch.where(is_ground[..., None], torch.lerp(lights[..., 5, :], lights[..., 4, :], 0.15).expand_as(sky), sky)
    colour = torch.lerp(haze, colour, fog)
    return torch.where((is_ground | (distance < _FAR))[..., None], colour, sky)
