# SPDX-License-Identifier: Apache-2.0
"""Rank roles, and the table used to choose a rank's role at startup."""

from collections.abc import Callable, Mapping

from vllm_omni.worker.diffusion.roles.before_vae import BeforeVAE
from vllm_omni.worker.diffusion.roles.layers import LayersStage
from vllm_omni.worker.diffusion.roles.role import RankParts, Role
from vllm_omni.worker.diffusion.roles.single import SingleRank, WholeChunks
from vllm_omni.worker.diffusion.roles.temporal import StageSteps
from vllm_omni.worker.diffusion.roles.vae import VAEStage
from vllm_omni.worker.diffusion.roles.with_layers import EveryStep, LastStage, LayersRole, StepSplit

STEPS: Mapping[str, Callable[[RankParts], StepSplit]] = {
    "blocks": lambda parts: EveryStep(parts.model, parts.parallel.last_stage),
    "temporal": lambda parts: StageSteps(
        parts.model, parts.parallel.stage, parts.parallel.num_stages
    ),
}
"""Functions that return the `StepSplit` of a rank with layers, keyed by the value of
`omni.pipeline`. A `StepSplit` defines which denoise steps of a chunk the rank runs."""


def _with_layers(role: Callable[[RankParts, StepSplit], LayersRole]) -> Callable[[RankParts], Role]:
    return lambda parts: role(parts, STEPS[parts.omni.pipeline](parts))


ROLES: tuple[tuple[Callable[[RankParts], bool], Callable[[RankParts], Role]], ...] = (
    (lambda parts: parts.parallel.is_vae_stage, VAEStage),
    (lambda parts: parts.parallel.last_stage and parts.parallel.vae_stage, _with_layers(BeforeVAE)),
    (lambda parts: not parts.step_at_a_time, WholeChunks),
    (lambda parts: parts.parallel.num_stages == 1, SingleRank),
    (lambda parts: parts.parallel.last_stage, _with_layers(LastStage)),
    (lambda parts: True, _with_layers(LayersStage)),
)
"""Pairs of a condition and a role. Each rank has the first role whose condition it meets."""


def role_for(parts: RankParts) -> Role:
    """Return the role of a rank. The role depends on the options and on the rank's position."""
    return next(role(parts) for fits, role in ROLES if fits(parts))
