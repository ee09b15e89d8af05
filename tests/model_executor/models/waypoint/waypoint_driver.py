# SPDX-License-Identifier: Apache-2.0
"""Drives a `Waypoint` model through the `WorldDriver` interface, with one frame per chunk."""

import torch
from helpers.world_driver import WorldDriver

from vllm_omni.model_executor.models.waypoint import checkpoint
from vllm_omni.model_executor.models.waypoint.pipeline import Waypoint, WaypointSetup

HEIGHT, WIDTH = 40, 64


def start_image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (30, 50, 3), dtype=torch.uint8, generator=generator)


DRIVER = WorldDriver(Waypoint, WaypointSetup, checkpoint, "waypoint", (HEIGHT, WIDTH))
load_world, open_session, make_request = DRIVER.load_world, DRIVER.open_session, DRIVER.make_request
run_chunk, latents_of = DRIVER.run_chunk, DRIVER.latents_of_stages
