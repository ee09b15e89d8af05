# SPDX-License-Identifier: Apache-2.0
"""A ray caster for the village that produces the same results on a CPU and on a GPU.

It casts 2x2 rays per pixel, intersects the bodies nearest to the camera with the slab method
(`casting.py`), and shades them by the directions of their faces. The ground and its baked sun
shadows are a mip-mapped texture (`shading.py`). torch compiles two functions into a few fused
kernels. Without a compiler, they run eagerly and more slowly. Tested by
tests/training/tiny_world/test_render.py.
"""

# B frames, R rays, K nearest polyhedra, J nearest ellipsoids, P planes, S styles

import math
from functools import cached_property

import torch

from training.tiny_world.casting import (
    cast,
    nearest_ellipsoids,
    nearest_polyhedra,
    rotate,
    shadow_patch,
    slabs,
)
from training.tiny_world.shading import LEVELS, LIGHTS, TEXELS, ground_masks, shade
from training.tiny_world.village import EYE_HEIGHT, PERIOD, Village

FOCAL = 0.65
"""Focal length divided by the image width. This value gives a field of view of 75 degrees."""


class Renderer:
    """Renders frames of the village on one device.

    Args:
        height: Height of the frames in pixels.
        width: Width of the frames in pixels.
        compiled: Whether to use torch.compile. Default: only on CUDA.
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
        self.compiled = compiled
        self._cast = torch.compile(cast, dynamic=False) if compiled else cast
        self._shade = torch.compile(shade, dynamic=False) if compiled else shade

    def render(
        self,
        positions_B2: torch.Tensor,
        yaw_B: torch.Tensor,
        pitch_B: torch.Tensor,
        style_B: torch.Tensor,
    ) -> torch.Tensor:
        """Render frames, uint8 [B, height, width, 3] on the device.

        Positions are x, z in metres. Yaw (to the right) and pitch (upwards) are in radians. Each
        style is an index into `STYLES`.
        """
        out = torch.empty(
            len(yaw_B), self.height, self.width, 3, dtype=torch.uint8, device=self.device
        )
        step = self.frames_per_call
        for start in range(0, len(yaw_B), step):
            views = [
                value[start : start + step].to(self.device)
                for value in (positions_B2, yaw_B, pitch_B, style_B)
            ]
            count = len(views[1])
            if self.compiled and count < step:  # pad to one shape to avoid a recompilation
                views = [
                    torch.cat((value, value[-1:].expand(step - count, *value.shape[1:])))
                    for value in views
                ]
            out[start : start + count] = self._frames(*views)[:count]
        return out

    def _frames(
        self, positions: torch.Tensor, yaw: torch.Tensor, pitch: torch.Tensor, style: torch.Tensor
    ) -> torch.Tensor:
        positions, yaw, pitch, style = positions.float(), yaw.float(), pitch.float(), style.long()
        village = self.village
        rays_BR3 = rotate(self._camera_rays, yaw, pitch)
        normals, offsets, which = nearest_polyhedra(village, positions)
        centres, radii, ball = nearest_ellipsoids(village, positions)
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
            rays_BR3,
            distance,
            index >= facing,
            hit_normals,
            hit_offsets,
            hit_centres,
            hit_radii,
            village.pattern_O[original],
            village.albedo_SO3[style_R, original],
            village.accent_SO3[style_R, original],
            village.ellipsoid_colour_SE3[style_R, leaf],
            positions,
            style,
            self._ground,
            self._lights,
            2 * self.width * FOCAL,
        )
        pixels = linear.view(len(yaw), self.height, 2, self.width, 2, 3).mean(dim=(2, 4))
        return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)

    def ground(self, style: int) -> torch.Tensor:
        """Return the lit ground seen from above, [texels z, texels x, 3] in [0, 1], with (0, 0) in
        the first corner.
        """
        return self._ground[style, : TEXELS * TEXELS, :3].reshape(TEXELS, TEXELS, 3)

    @cached_property
    def _camera_rays(self) -> torch.Tensor:
        """Return the unit directions of all rays in camera axes, row by row."""
        focal = 2 * self.width * FOCAL
        u = (torch.arange(2 * self.width, device=self.device) + 0.5 - self.width) / focal
        v = (torch.arange(2 * self.height, device=self.device) + 0.5 - self.height) / focal
        y, x = torch.meshgrid(v, u, indexing="ij")
        return torch.nn.functional.normalize(
            torch.stack((x, y, torch.ones_like(x)), dim=-1).view(-1, 3), dim=1
        )

    @cached_property
    def _lights(self) -> torch.Tensor:
        """Return the lighting of all styles, fp32 [S, 8, 3]: sun direction, sunlight, ambient,
        zenith, horizon, hills, water, snow.
        """
        rows = []
        for light in LIGHTS:
            norm = math.hypot(*light.sun_3)
            sun = tuple(value / norm for value in light.sun_3)
            rows.append(
                (
                    sun,
                    light.sunlight,
                    light.ambient,
                    light.zenith,
                    light.horizon,
                    light.hills,
                    light.water,
                    (light.snow,) * 3,
                )
            )
        return torch.tensor(rows, device=self.device)

    @cached_property
    def _ground(self) -> torch.Tensor:
        """Return the ground's lit colours, fp32 [S, texels of all levels, 4]. The fourth channel
        marks water.
        """
        lights = self._lights
        cells = (torch.arange(TEXELS, device=self.device) + 0.5) * (PERIOD / TEXELS)
        z, x = torch.meshgrid(cells, cells, indexing="ij")
        here = torch.stack((x, z), dim=-1).view(-1, 2)
        path, water, patches = ground_masks(here)
        levels = []
        for index, light in enumerate(LIGHTS):
            grass = torch.tensor(light.grass, device=self.device) * (
                1 + (0.16 if light.snow == 0 else 0.04) * patches[:, None]
            )
            albedo = torch.lerp(grass, torch.tensor(light.path, device=self.device), path[:, None])
            sun = lights[index, 0]
            shadow = self._in_shadow(sun)
            lit = lights[index, 2] + lights[index, 1] * (-sun[1] * (1 - 0.85 * shadow))[:, None]
            colour = torch.lerp(albedo * lit, lights[index, 6].expand_as(albedo), water[:, None])
            levels.append(torch.cat((colour, water[:, None]), dim=1))
        image = torch.stack(levels).view(len(LIGHTS), TEXELS, TEXELS, 4).permute(0, 3, 1, 2)
        flat = []
        for _ in range(LEVELS):
            flat.append(image.permute(0, 2, 3, 1).reshape(len(LIGHTS), -1, 4))
            image = torch.nn.functional.avg_pool2d(image, 2)
        return torch.cat(flat, dim=1).contiguous()

    def _in_shadow(self, sun_3: torch.Tensor) -> torch.Tensor:
        """Return how much sunlight is blocked at each texel, [texels]. Shadows are cast at half the
        texture's resolution.
        """
        side = TEXELS // 2
        shadow = torch.zeros(side * side, device=self.device)
        village = self.village
        for index, radius in enumerate(village.radius_O.tolist()):
            x, z, where = shadow_patch(village.centres_O3[index], radius, sun_3, side)
            normals, offsets = village.normals_OP3[index], village.offsets_OP[index]
            ground = (
                torch.stack((x, torch.full_like(x, EYE_HEIGHT - 0.01), z), dim=1)
                - village.centres_O3[index]
            )
            enter, leave, _ = slabs(
                sun_3.expand(len(x), 3), normals[None], offsets - ground @ normals.mT
            )
            shadow.scatter_reduce_(0, where, ((enter < leave) & (leave > 0)).float(), "amax")
        for centre_3, radii_3 in zip(
            village.ellipsoid_centres_E3, village.ellipsoid_radii_E3, strict=True
        ):
            x, z, where = shadow_patch(centre_3, float(radii_3.max()), sun_3, side)
            c = (
                centre_3 - torch.stack((x, torch.full_like(x, EYE_HEIGHT - 0.01), z), dim=1)
            ) / radii_3
            q = sun_3 / radii_3
            qc, qq = c @ q, (q * q).sum()
            meets = (qc * qc - qq * ((c * c).sum(-1) - 1) > 0) & (qc > 0)
            shadow.scatter_reduce_(0, where, meets.float(), "amax")
        image = torch.nn.functional.pad(
            shadow.view(1, 1, side, side), (1, 1, 1, 1), mode="circular"
        )
        image = torch.nn.functional.interpolate(
            image, scale_factor=2.0, mode="bilinear", align_corners=False
        )
        return image[0, 0, 2:-2, 2:-2].reshape(-1)
