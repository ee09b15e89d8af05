# SPDX-License-Identifier: Apache-2.0
"""Casts rays into the village: finds the bodies near a camera and the first body that each ray
hits.

Every body repeats periodically in the ground plane. The camera is at the origin. `cast` is written
for torch's compiler, which turns it into one fused reduction over the bodies. Tested by
tests/training/tiny_world/test_render.py.
"""

# B frames, R rays, K nearest polyhedra, J nearest ellipsoids, P = 6 planes

import math

import torch

from training.tiny_world.village import EYE_HEIGHT, PERIOD, Village, wrap

FAR = 1e4
"""Distance in metres reported for rays that hit no body."""
_NEAREST = (52, 28)
"""Numbers of nearest polyhedra and nearest ellipsoids rendered in a frame."""


def rotate(rays_R3: torch.Tensor, yaw_B: torch.Tensor, pitch_B: torch.Tensor) -> torch.Tensor:
    """Rotate rays from camera axes to world axes: pitch about x, then yaw about y, as `camera.py`
    composes held keys.
    """
    cp, sp = pitch_B.cos()[:, None], pitch_B.sin()[:, None]
    cy, sy = yaw_B.cos()[:, None], yaw_B.sin()[:, None]
    x, y, z = rays_R3.unbind(1)
    y2, z2 = cp * y - sp * z, sp * y + cp * z
    return torch.stack((cy * x + sy * z2, y2, -sy * x + cy * z2), dim=-1)


def copies(centres_N3: torch.Tensor, positions_B2: torch.Tensor) -> torch.Tensor:
    """Return body centres relative to each camera, [B, 4 N, 3]: each body's nearest copy and the
    next copy along each axis.
    """
    dx = wrap(centres_N3[:, 0] - positions_B2[:, :1])
    dz = wrap(centres_N3[:, 2] - positions_B2[:, 1:])
    y = centres_N3[:, 1].expand_as(dx)
    xs = (dx, dx - PERIOD * torch.where(dx >= 0, 1.0, -1.0))
    zs = (dz, dz - PERIOD * torch.where(dz >= 0, 1.0, -1.0))
    return torch.cat([torch.stack((a, y, b), dim=-1) for a in xs for b in zs], dim=1)


def closest(centres_BN3: torch.Tensor, radius_N: torch.Tensor, keep: int) -> torch.Tensor:
    distance = centres_BN3[..., [0, 2]].norm(dim=-1) - radius_N
    return distance.topk(min(keep, distance.shape[1]), dim=1, largest=False).indices


def nearest_polyhedra(
    village: Village, positions_B2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the polyhedra nearest to each camera: normals [B, K, P, 3], offsets [B, K, P] with the
    camera at the origin, and polyhedron indices [B, K].
    """
    centres = copies(village.centres_O3, positions_B2)
    chosen = closest(centres, village.radius_O.repeat(4), _NEAREST[0])
    which = chosen % len(village.centres_O3)
    here = torch.gather(centres, 1, chosen[..., None].expand(*chosen.shape, 3))
    normals = village.normals_OP3[which]
    offsets = village.offsets_OP[which] + (normals * here[:, :, None]).sum(-1)
    return normals, offsets, which


def nearest_ellipsoids(
    village: Village, positions_B2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    centres = copies(village.ellipsoid_centres_E3, positions_B2)
    chosen = closest(centres, village.ellipsoid_radii_E3[:, 0].repeat(4), _NEAREST[1])
    which = chosen % len(village.ellipsoid_centres_E3)
    return (
        torch.gather(centres, 1, chosen[..., None].expand(*chosen.shape, 3)),
        village.ellipsoid_radii_E3[which],
        which,
    )


def slabs(
    rays: torch.Tensor, normals: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distances at which rays from the origin enter and leave convex bodies, and the
    planes through which they enter. `offsets` is [..., P].
    """
    enter = torch.full_like(offsets[..., 0] * rays[..., 0], -FAR)
    leave = torch.full_like(enter, FAR)
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


def cast(
    rays_BR3: torch.Tensor,
    normals: torch.Tensor,
    offsets: torch.Tensor,
    centres: torch.Tensor,
    radii: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance [B, R] to the nearest body (`FAR` if a ray hits none) and that body's
    index, which counts polyhedra first and then ellipsoids.
    """
    rays = rays_BR3[:, :, None, :]
    enter, leave, _ = slabs(rays, normals[:, None], offsets[:, None])
    solid = torch.where((enter < leave) & (enter > 0.02), enter, FAR)
    q = rays / radii[:, None]
    c = (centres / radii)[:, None]
    qq, qc, cc = (q * q).sum(-1), (q * c).sum(-1), (c * c).sum(-1)
    inside = qc * qc - qq * (cc - 1)
    t = (qc - inside.clamp(min=0).sqrt()) / qq
    balls = torch.where((inside > 0) & (t > 0.02), t, FAR)
    solid_distance, solid_index = solid.min(dim=2)
    ball_distance, ball_index = balls.min(dim=2)
    nearer = ball_distance < solid_distance
    return torch.minimum(solid_distance, ball_distance), torch.where(
        nearer, ball_index + normals.shape[1], solid_index
    )


def shadow_patch(
    centre_3: torch.Tensor, radius: float, sun_3: torch.Tensor, side: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ground points x, z that a body can shade, each [n], and the texel index of each
    point.
    """
    sx, sy, sz = sun_3.tolist()
    x, y, z = centre_3.tolist()
    # Distance to the end of the shadow, in multiples of the horizontal part of the sun direction.
    reach = (EYE_HEIGHT - y + radius) / -sy
    low_x, high_x = sorted((x, x - sx * reach))
    low_z, high_z = sorted((z, z - sz * reach))
    texel = PERIOD / side

    def cells(low: float, high: float) -> torch.Tensor:
        return torch.arange(
            math.floor((low - radius) / texel),
            math.ceil((high + radius) / texel),
            device=centre_3.device,
        )

    rows, columns = torch.meshgrid(cells(low_z, high_z), cells(low_x, high_x), indexing="ij")
    where = torch.remainder(rows, side) * side + torch.remainder(columns, side)
    return (columns.flatten() + 0.5) * texel, (rows.flatten() + 0.5) * texel, where.flatten()
