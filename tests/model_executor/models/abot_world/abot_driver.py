# SPDX-License-Identifier: Apache-2.0
"""Drives an `AbotWorld` model through the `WorldDriver` interface."""

import torch
from helpers.world_driver import WorldDriver, random_image

from vllm_omni.actions import image_tensor
from vllm_omni.model_executor.models.abot_world import checkpoint
from vllm_omni.model_executor.models.abot_world.pipeline import AbotWorld, AbotWorldSetup

HEIGHT, WIDTH = 32, 64


def references(*names: str) -> dict[str, torch.Tensor]:
    """Return reference images as a request's tensors."""
    return {image_tensor(name): random_image(10 + n) for n, name in enumerate(names)}


DRIVER = WorldDriver(
    AbotWorld,
    AbotWorldSetup,
    checkpoint,
    "abot_world",
    (HEIGHT, WIDTH),
    tensors={"image": random_image(), **references("head", "front")},
)
load_world, open_session, make_request = DRIVER.load_world, DRIVER.open_session, DRIVER.make_request
run_chunk, latents_of = DRIVER.run_chunk, DRIVER.latents_of
latents_of_stages = DRIVER.latents_of_stages
