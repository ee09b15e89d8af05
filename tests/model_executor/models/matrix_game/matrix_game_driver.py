# SPDX-License-Identifier: Apache-2.0
"""Drives a `MatrixGame` model through the `WorldDriver` interface."""

from helpers.golden import golden_folder
from helpers.world_driver import WorldDriver, random_image

from vllm_omni.model_executor.models.matrix_game import checkpoint
from vllm_omni.model_executor.models.matrix_game.pipeline import MatrixGame, MatrixGameSetup

GOLDEN = golden_folder("matrix_game_2")
HEIGHT, WIDTH = 32, 48

DRIVER = WorldDriver(
    MatrixGame,
    MatrixGameSetup,
    checkpoint,
    "matrix_game",
    (HEIGHT, WIDTH),
    tensors={"image": random_image()},
)
load_game, open_session, make_request = DRIVER.load_world, DRIVER.open_session, DRIVER.make_request
run_chunk, latents_of = DRIVER.run_chunk, DRIVER.latents_of
latents_of_stages = DRIVER.latents_of_stages
