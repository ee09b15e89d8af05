# SPDX-License-Identifier: Apache-2.0
"""Running the two branches of classifier-free guidance on two ranks (gloo, two processes) produces
the same latents as running them on one rank.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from helpers.wan22_driver import NEGATIVE, Wan22, load_model, start, step

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext

TOLERANCE = 5e-5
"""Tolerance for fp32 latents of magnitude 1 after four steps. Results are not bit-identical,
because kernels partition matrix products for one branch differently from those for both branches.
"""


def _latents(model: Wan22) -> list[torch.Tensor]:
    """Return the latents of two requests with guidance and one without. They run in one batch and
    use both experts.
    """
    batch = [
        start(model, seed=1, negative_prompt=NEGATIVE, guidance_scale=3.0),
        start(model, seed=2, guidance_scale=1.0),
        start(model, seed=3, guidance_scale=5.0),
    ]
    for _ in range(batch[0].num_steps):
        step(model, batch)
    return [model.latents(request) for request in batch]


def _compare(rank: int, rendezvous: str, checkpoint: Path) -> None:
    with process_group(rank, 2, rendezvous) as group:
        expected = _latents(load_model(checkpoint))
        model = load_model(checkpoint, ParallelContext(rank, 2, group), cfg_parallel=True)
        assert model.decodes == (rank == 0)
        got = _latents(model)
        for ours, one_rank in zip(got, expected, strict=True):
            difference = (ours - one_rank).abs().max().item()
            assert difference <= TOLERANCE, difference
        both = [torch.empty_like(got[0]) for _ in range(2)]
        dist.all_gather(both, got[0])
        assert torch.equal(*both), "both ranks continue with the same latents"


@pytest.mark.nightly
def test_two_ranks_equal_one(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(_compare, (str(tmp_path / "rendezvous"), checkpoints["t2v"]), 2)


def test_unsupported_guidance_ranks_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="two ranks: pass --tensor-parallel-size 2, got 1"):
        load_model(checkpoints["t2v"], cfg_parallel=True)
    with pytest.raises(ValueError, match="both take the tensor-parallel ranks"):
        load_model(checkpoints["t2v"], cfg_parallel=True, sequence_parallel=True)
