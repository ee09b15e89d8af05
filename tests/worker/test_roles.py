# SPDX-License-Identifier: Apache-2.0
"""How a rank's options and stage determine its role, and what the smaller roles do."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, step

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.worker.diffusion.roles import role_for
from vllm_omni.worker.diffusion.roles.before_vae import BeforeVAE
from vllm_omni.worker.diffusion.roles.layers import LayersStage
from vllm_omni.worker.diffusion.roles.single import SingleRank, WholeChunks
from vllm_omni.worker.diffusion.roles.temporal import StageSteps
from vllm_omni.worker.diffusion.roles.vae import VAEStage
from vllm_omni.worker.diffusion.roles.with_layers import EveryStep, LastStage, LayersRole


@pytest.mark.parametrize(
    ("position", "step_at_a_time", "role", "decodes"),
    [
        # (stage, number of stages with layers, whether a VAE stage follows them)
        ((0, 1, False), True, SingleRank, True),
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
def test_the_stage_of_a_rank_determines_its_role(
    make_runner: Any,
    null_world: Path,
    position: tuple[int, int, bool],
    step_at_a_time: bool,
    role: type,
    decodes: bool,
    pipeline: Any,
) -> None:
    """A rank's stage determines its role. The role is the same whether the model is split by blocks
    or by steps.
    """
    stage, num_stages, vae_stage = position
    parts = replace(
        make_runner(null_world).parts,
        parallel=ParallelContext(stage=stage, num_stages=num_stages, vae_stage=vae_stage),
        omni=OmniConfig(vae_stage=vae_stage, pipeline=pipeline),
        step_at_a_time=step_at_a_time,
    )
    found = role_for(parts)
    assert type(found) is role and found.decodes_chunks == decodes
    if isinstance(found, LayersRole):
        assert type(found.steps) is (EveryStep if pipeline == "blocks" else StageSteps)


class Doubler:
    """A mock model that doubles the latents in each step and adds the step number."""

    def set_latents(self, request: Any, latents: torch.Tensor) -> None:
        request.latents = latents

    def latents(self, request: Any) -> torch.Tensor:
        return request.latents

    def denoise_step(self, batch: Sequence[Any]) -> list[torch.Tensor]:
        return [2 * request.latents + request.step for request in batch]

    def step_scheduler(self, batch: Sequence[Any], predictions: list[torch.Tensor]) -> None:
        for request, latents in zip(batch, predictions, strict=True):
            request.latents = latents


def test_temporal_stages_pass_latents_through_all_steps() -> None:
    """Each temporal stage runs the denoise step whose index equals the stage's index.

    The last stage sends its input latents back to the earlier stages once.
    """
    model: Any = Doubler()
    chunks = [
        SimpleNamespace(request_id=name, step=0, num_steps=3, latents=torch.full((2,), 1.0))
        for name in "ab"
    ]
    latents = None
    for stage in range(3):
        taker = StageSteps(model, stage, 3)
        entered = latents
        for chunk in chunks:
            chunk.step = 0
        latents = taker.run_steps(chunks, latents)  # type: ignore[arg-type]
        assert [chunk.step for chunk in chunks] == [3, 3]
        if stage < 2:
            with pytest.raises(KeyError):
                taker.latents_for_earlier_stages(chunks[0])  # type: ignore[arg-type]
    assert latents is not None and latents.tolist() == [[12.0, 12.0]] * 2  # 1 -> 2 -> 5 -> 12
    assert entered is not None
    for chunk in chunks:
        assert torch.equal(taker.latents_for_earlier_stages(chunk), entered[0])  # type: ignore[arg-type]
        with pytest.raises(KeyError):
            taker.latents_for_earlier_stages(chunk)  # type: ignore[arg-type]


def test_whole_chunks_of_a_session_run_in_the_order_of_their_index(
    make_runner: Any, null_world: Path
) -> None:
    """Whole chunks of a session run in index order, whatever their order in the batch.

    The batch also contains another session and an invalid request.
    """
    runner = make_runner(null_world, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    assert isinstance(runner.role, WholeChunks)
    wrong = new_request("wrong", session_id="w")
    assert wrong.pooling_params is not None
    wrong.pooling_params.extra_kwargs = {"omni": 1}
    found = execute(
        runner,
        step(
            new=[
                new_request("s1", session_id="s", chunk_index=1),
                new_request("s0", session_id="s", chunk_index=0, prompt="a field", seed=3),
                new_request("t0", session_id="t", chunk_index=0, prompt="a field", seed=4),
                wrong,
            ]
        ),
    )
    assert [found[name][0]["chunk_index"] for name in ("s0", "s1", "t0")] == [0, 1, 0]
    assert found["wrong"].code == "invalid_request"
