# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel runs produce the same results as a single rank (fp32, gloo, two processes)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from waypoint_driver import latents_of, load_world, start_image

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.waypoint.checkpoint import LAYOUTS

TOLERANCE = 1e-4
"""Tolerance for six frames in fp32. Results are not bit-identical, because splitting sums across
ranks changes the order of summation.
"""
CHUNKS: list[dict[str, Any]] = [
    {"tensors": {"image": start_image()}, "actions": [["w"]]},
    *({"actions": [["a", "space"]]} for _ in range(5)),
]


def _compare(rank: int, rendezvous: str, checkpoint: str, one_rank: str) -> None:
    with process_group(rank, 2, rendezvous) as group:
        world = load_world(Path(checkpoint), ParallelContext(rank, 2, group))
        assert world.transformer.num_cache_heads == 1
        torch.testing.assert_close(
            latents_of([world], CHUNKS), torch.load(one_rank), atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one(layout: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    rendezvous, one_rank = tmp_path / "rendezvous", tmp_path / "one_rank.pt"
    checkpoint = checkpoints[layout]
    torch.save(latents_of([load_world(checkpoint)], CHUNKS), one_rank)
    run_ranks(_compare, (str(rendezvous), str(checkpoint), str(one_rank)), 2)
