# SPDX-License-Identifier: Apache-2.0
"""Colours of the village: light and sky of the three styles, the ground pattern, faces, leaves,
water and fog.

`shade` is written for torch's compiler. The caller gathers the properties of the body that each ray
hits. Tested by tests/training/tiny_world/test_render.py.
"""

# B frames, R rays, S styles

import math
from dataclasses import dataclass

import torch

from training.tiny_world.casting import FAR, slabs
from training.tiny_world.village import EYE_HEIGHT, PERIOD, POND, ROOF, STRIPES, WALL, wrap

TEXELS = 512
"""Side length of the ground texture, in texels."""
LEVELS = 6
"""Number of mip levels of the ground texture."""
_FOG_M = 19.0


@dataclass(frozen=True)
class Light:
    """Lighting of a style: the direction to the sun, and colours in [0, 1]."""

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
        (0.45, -0.75, -0.48),
        (0.78, 0.74, 0.64),
        (0.42, 0.45, 0.50),
        (0.27, 0.50, 0.86),
        (0.74, 0.86, 0.95),
        (0.36, 0.52, 0.50),
        (0.36, 0.56, 0.22),
        (0.74, 0.64, 0.48),
        (0.22, 0.42, 0.60),
        0.0,
    ),
    Light(
        (-0.88, -0.30, 0.37),
        (0.78, 0.40, 0.16),
        (0.26, 0.22, 0.34),
        (0.16, 0.13, 0.34),
        (0.95, 0.52, 0.28),
        (0.22, 0.14, 0.28),
        (0.30, 0.40, 0.20),
        (0.60, 0.50, 0.42),
        (0.20, 0.20, 0.36),
        0.0,
    ),
    Light(
        (0.30, -0.60, 0.74),
        (0.34, 0.34, 0.34),
        (0.60, 0.62, 0.66),
        (0.66, 0.72, 0.80),
        (0.90, 0.92, 0.95),
        (0.78, 0.82, 0.88),
        (0.92, 0.94, 0.97),
        (0.66, 0.62, 0.60),
        (0.60, 0.72, 0.82),
        1.0,
    ),
)


def ground_masks(here_N2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return masks of paths, the pond and soft patches of grass at points x, z, each [N]. Path and
    pond masks are in [0, 1].
    """
    x, z = here_N2.unbind(1)
    turn = 2 * math.pi / PERIOD

    def edge(distance: torch.Tensor) -> torch.Tensor:
        return (0.5 - distance / 0.12).clamp(0, 1)

    street = wrap(x - 1.6 - 1.5 * torch.sin(turn * z + 0.6)).abs() - 1.0
    thread = wrap(z + 1.5 - 1.8 * torch.sin(turn * x)).abs() - 0.9
    square = torch.hypot(wrap(x), wrap(z - 0.6)) - 3.4
    path = edge(torch.minimum(torch.minimum(street, thread), square))
    px, pz, half_x, half_z = POND
    water = edge((torch.hypot(wrap(x - px) / half_x, wrap(z - pz) / half_z) - 1) * half_z)
    patches = torch.sin(turn * (3 * x + 2 * z)) * torch.sin(
        turn * (2 * x - 4 * z) + 1
    ) + 0.5 * torch.sin(turn * 5 * z + 2)
    return path * (1 - water), water, patches


def _texture(
    ground: torch.Tensor, style: torch.Tensor, x: torch.Tensor, z: torch.Tensor, level: torch.Tensor
) -> torch.Tensor:
    """Look up the periodic ground texture with trilinear filtering, [B, R, 4]."""
    low = level.floor().clamp(0, LEVELS - 2)
    blend = (level - low).clamp(0, 1)[..., None]
    return torch.lerp(
        _bilinear(ground, style, x, z, low), _bilinear(ground, style, x, z, low + 1), blend
    )


def _bilinear(
    ground: torch.Tensor, style: torch.Tensor, x: torch.Tensor, z: torch.Tensor, level: torch.Tensor
) -> torch.Tensor:
    side = TEXELS / torch.exp2(level)
    # Number of texels in the previous levels: side0^2 (1 + 1/4 + ...) = 4/3 side0^2 (1 - 4^-level).
    start = (TEXELS * TEXELS * 4 / 3 * (1 - torch.exp2(-2 * level))).round().long()
    u, v = x / PERIOD * side - 0.5, z / PERIOD * side - 0.5
    u0, v0 = u.floor(), v.floor()
    fu, fv = (u - u0)[..., None], (v - v0)[..., None]
    side_long = side.round().long()
    columns = [torch.remainder(u0 + step, side).long().clamp(max=side_long - 1) for step in (0, 1)]
    rows = [torch.remainder(v0 + step, side).long().clamp(max=side_long - 1) for step in (0, 1)]
    flat = ground.view(-1, 4)
    base = (style * ground.shape[1])[:, None] + start
    (a, b), (c, d) = ([flat[base + row * side_long + column] for column in columns] for row in rows)
    return torch.lerp(torch.lerp(a, b, fu), torch.lerp(c, d, fu), fv)


def _sky(rays: torch.Tensor, lights: torch.Tensor) -> torch.Tensor:
    """Return the colour of the sky and the hills in each ray's direction, [B, R, 3]. `lights` is
    [B, 1, 8, 3].
    """
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
    cloud = torch.sin(3 * heading + 0.7) * torch.sin(
        drift + torch.sin(5 * heading)
    ) + 0.6 * torch.sin(7 * heading + 2 * drift)
    sky = torch.lerp(
        sky,
        lights[..., 4, :] * 1.05,
        ((cloud - 0.35) * 2.5).clamp(0, 0.75)[..., None] * (up * 5).clamp(0, 1)[..., None],
    )
    near = (
        0.10
        + 0.035 * torch.sin(3 * heading + 1)
        + 0.03 * torch.sin(7 * heading)
        + 0.015 * torch.sin(13 * heading + 2)
    )
    peak = 0.24 * (
        1 - ((torch.remainder(heading - 0.6 + math.pi, 2 * math.pi) - math.pi).abs() / 0.32)
    ).clamp(min=0)
    twin = 0.18 * (
        1 - ((torch.remainder(heading + 1.9 + math.pi, 2 * math.pi) - math.pi).abs() / 0.18)
    ).clamp(min=0)
    far = 0.06 + torch.maximum(peak, twin)
    far_hills = torch.lerp(lights[..., 5, :], lights[..., 4, :], 0.45)
    # snow on the peaks
    cap = torch.where((up > far - 0.06)[..., None], far_hills * 0.4 + 0.6, far_hills)
    sky = torch.where((up < far)[..., None], cap, sky)
    return torch.where((up < near)[..., None], lights[..., 5, :].expand_as(sky), sky)


def shade(
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
    """Return each ray's colour, [B, R, 3]. The caller must have gathered the properties of the hit
    bodies.
    """
    lights = all_lights[style][:, None]
    sky = _sky(rays, lights)
    point = rays * distance[..., None]

    # For bodies with faces, the plane through which the ray enters determines the normal and the
    # pattern.
    _, _, face = slabs(rays, normals, offsets)
    chosen = face.long()[..., None, None].expand(*face.shape, 1, 3)
    normal = torch.gather(normals, 2, chosen)[..., 0, :]
    # Distances along the wall from its middle, for every copy of a body. The plane offsets give the
    # middle.
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
    frame = (
        ((cell - cell.floor() - 0.5).abs() < 0.36)
        & (u.abs() < half)
        & upright
        & (storey > 0.93)
        & (storey < 2.07)
    )
    endpoint = (face == 3) & (u.abs() < 0.42) & (height < 1.9) & upright
    is_wall = pattern == WALL
    body = torch.where((is_wall & frame)[..., None], torch.ones_like(albedo) * 0.95, albedo)
    body = torch.where((is_wall & window)[..., None], accent, body)
    body = torch.where(
        (is_wall & endpoint)[..., None],
        torch.stack((0.30 + 0 * u, 0.17 + 0 * u, 0.10 + 0 * u), dim=-1),
        body,
    )
    base = is_wall & (height < 0.35) & upright
    body = torch.where(base[..., None], albedo * 0.62, body)
    gable = (pattern == ROOF) & upright & (face < 2)
    body = torch.where(gable[..., None], accent, body)
    striped = (pattern == STRIPES) & (torch.remainder(height, 2.0) > 1.0)
    body = torch.where(striped[..., None], accent, body)
    lamp = is_wall & window & (style == 1)[:, None]

    # Round bodies.
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

    # The ground plane.
    down = rays[..., 1].clamp(min=1e-6)
    to_ground = EYE_HEIGHT / down
    gx, gz = (
        positions[:, :1] + rays[..., 0] * to_ground,
        positions[:, 1:] + rays[..., 2] * to_ground,
    )
    footprint = to_ground / focal / down.sqrt() * (TEXELS / PERIOD)
    texel = _texture(ground, style, gx, gz, torch.log2(footprint.clamp(min=1.0)))
    mirror = _sky(rays * torch.tensor((1.0, -1.0, 1.0), device=rays.device), lights)
    earth = torch.lerp(texel[..., :3], mirror, texel[..., 3:] * 0.45)

    is_ground = (rays[..., 1] > 1e-4) & (to_ground < distance)
    reach = torch.where(is_ground, to_ground, distance)
    colour = torch.where(is_ground[..., None], earth, lit)
    fog = torch.exp(-((reach / _FOG_M) ** 3))[..., None]
    # The ground extends to the horizon, where the hills begin.
    haze = torch.where(
        is_ground[..., None],
        torch.lerp(lights[..., 5, :], lights[..., 4, :], 0.15).expand_as(sky),
        sky,
    )
    colour = torch.lerp(haze, colour, fog)
    return torch.where((is_ground | (distance < FAR))[..., None], colour, sky)
