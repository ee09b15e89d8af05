# SPDX-License-Identifier: Apache-2.0
"""Drives a `DreamXWorld` model through the `WorldDriver` interface."""

from helpers.world_driver import WorldDriver, random_image

from vllm_omni.model_executor.models.dreamx_world import checkpoint
from vllm_omni.model_executor.models.dreamx_world.pipeline import DreamXSetup, DreamXWorld

HEIGHT, WIDTH = 64, 96

DRIVER = WorldDriver(
    DreamXWorld,
    DreamXSetup,
    checkpoint,
    "dreamx_world",
    (HEIGHT, WIDTH),
    tensors={"image": random_image()},
    params={"prompt": "a path in a forest"},
)
load_world, open_session, make_request = DRIVER.load_world, DRIVER.open_session, DRIVER.make_request
run_chunk, latents_of = DRIVER.run_chunk, DRIVER.latents_of
latents_of_stages = DRIVER.latents_of_stages
