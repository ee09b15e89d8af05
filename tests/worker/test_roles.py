# SPDX-License-Identifier: Apache-2.0
"""Which role a rank takes, from the options and its place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.worker.diffusion.roles import role_for
from vllm_omni.worker.diffusion.roles.before_vae import BeforeVAE
from vllm_omni.worker.diffusion.roles.last import LastStage
from vllm_omni.worker.diffusion.roles.layers import LayersStage
from vllm_omni.worker.diffusion.roles.single import Single, WholeChunks
from vllm_omni.worker.diffusion.roles.temporal import OwnStep
from vllm_omni.worker.diffusion.roles.vae import VAEStage
from vllm_omni.worker.diffusion.roles.with_layers import EveryStep, WithLayers


@pytest.mark.parametrize(
    ("place", "step_at_a_time", "role", "decodes"),
    [
        # (stage, stages with layers, whether a VAE stage follows them)
        ((0, 1, False), True, Single, True),
        ((0, 1, False), False, WholeChunks, True),
        ((0, 3, False), True, LayersStage, False),
        ((1, 3, False), True, LayersStage, False),
        ((2, 3, False), True, LastStage, True),
        ((0, 2, True), True, LayersStage, False),
        ((1, 2, True), True, BeforeVAE, False),
        ((0, 1, True), True, BeforeVAE, False),
        ((1, 1, True), True, VAEStage, False),
        ((2, 2, True), True, VAEStage, False),
    ],
)
@pytest.mark.parametrize("pipeline", ["blocks", "temporal"])
def test_a_rank_has_the_role_of_its_place(
    make_runner: Any,
    null_world: Path,
    place: tuple[int, int, bool],
    step_at_a_time: bool,
    role: type,
    decodes: bool,
    pipeline: Any,
) -> None:
    """What a stage owns, all steps or one, changes no role."""
    stage, num_stages, vae_stage = place
    parts = replace(
        make_runner(null_world).parts,
        place=ParallelContext(stage=stage, num_stages=num_stages, vae_stage=vae_stage),
        omni=OmniConfig(vae_stage=vae_stage, pipeline=pipeline),
        step_at_a_time=step_at_a_time,
    )
    found = role_for(parts)
    assert type(found) is role and found.decodes_chunks == decodes
    if isinstance(found, WithLayers):
        assert type(found.steps) is (EveryStep if pipeline == "blocks" else OwnStep)
