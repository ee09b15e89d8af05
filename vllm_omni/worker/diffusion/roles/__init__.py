# SPDX-License-Identifier: Apache-2.0
"""Roles of ranks in the engine's topology: one file per role, one table from which a role is chosen at start."""

from collections.abc import Callable, Mapping

from vllm_omni.worker.diffusion.roles.before_vae import BeforeVAE
from vllm_omni.worker.diffusion.roles.layers import LayersStage
from vllm_omni.worker.diffusion.roles.role import RankParts, Role
from vllm_omni.worker.diffusion.roles.single import Single, WholeChunks
from vllm_omni.worker.diffusion.roles.temporal import OwnStep
from vllm_omni.worker.diffusion.roles.vae import VAEStage
from vllm_omni.worker.diffusion.roles.with_layers import EveryStep, LastStage, StepTaker, WithLayers

STEPS: Mapping[str, Callable[[RankParts], StepTaker]] = {
    "blocks": lambda parts: EveryStep(parts.model, parts.place.last_stage),
    "temporal": lambda parts: OwnStep(parts.model, parts.place.stage, parts.place.num_stages),
}
"""`omni.pipeline` -> which of a chunk's denoise steps a rank with layers runs."""


def _with_layers(role: Callable[[RankParts, StepTaker], WithLayers]) -> Callable[[RankParts], Role]:
    return lambda parts: role(parts, STEPS[parts.omni.pipeline](parts))


ROLES: tuple[tuple[Callable[[RankParts], bool], Callable[[RankParts], Role]], ...] = (
    (lambda parts: parts.place.is_vae_stage, VAEStage),
    (lambda parts: parts.place.last_stage and parts.place.vae_stage, _with_layers(BeforeVAE)),
    (lambda parts: not parts.step_at_a_time, WholeChunks),
    (lambda parts: parts.place.num_stages == 1, Single),
    (lambda parts: parts.place.last_stage, _with_layers(LastStage)),
    (lambda parts: True, _with_layers(LayersStage)),
)
"""(which ranks, their role); the first row that fits is taken."""


def role_for(parts: RankParts) -> Role:
    """This rank's role, from the options and its place among the ranks."""
    return next(role(parts) for fits, role in ROLES if fits(parts))
